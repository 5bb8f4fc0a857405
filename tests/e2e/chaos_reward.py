"""A reward that needs a worker process, so that there is one to kill: whether the response has an even length."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    return float(len(solution_str) % 2 == 0)
