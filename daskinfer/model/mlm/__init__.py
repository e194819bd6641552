"""STAC items of models (extension ``mlm``): read into a recipe, written from one."""
