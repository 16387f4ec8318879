"""One file per family of published models: its config keys and tensor rules, read both ways.

family     the type of a family
registry   the list of families; add yours to it
canonical  the one form of model.json that a family's config stands for
"""
