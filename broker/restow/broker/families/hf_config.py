"""stub"""


def model_from_hf_config(): ...
