"""DP-Merging against plain DP-SGD (arXiv 2608.26655) on small real tasks: what `remerge experiment dp-merging` runs.

The setting (`setting`), the plan of runs (`plan`), and what is made of the results (`summary`, `page`, `figures`) are
pure. One run of training (`running`) and one scoring of merges (`scoring`) are made of the product's own parts; their
results are kept by key (`store`), so that whatever was finished is never done twice. `workers` does the plan.
"""
