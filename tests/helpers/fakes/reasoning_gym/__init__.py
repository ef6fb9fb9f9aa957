"""The part of reasoning-gym used by the adapter: item i of a dataset with seed s is made from s + i."""


class Dataset:
    def __init__(self, name, seed, size, max_terms=3):
        self.name, self.seed, self.size, self.max_terms = name, seed, size, max_terms

    def __getitem__(self, index):
        number = 7 if self.name == "coin_flip" else (self.seed + index) % 5000
        if self.name == "graph_color":
            return {"question": f"colour {number}", "answer": None, "metadata": {}}
        answer = f"{number}\n{number}" if self.name == "sudoku" else str(number)
        return {
            "question": f"{self.name} of {number} in {self.max_terms}?",
            "answer": answer,
            "metadata": {1: {2}},
        }

    def score_answer(self, answer, item):
        assert item["metadata"] == {1: {2}}, (
            "scorers get the item itself, not what JSON makes of it"
        )
        print("noise on standard output")
        if self.name == "countdown":
            return float(eval(answer, {"os": __import__("os")}) == int(item["answer"]))
        return 1.0 if answer == item["answer"] else 0.5 if item["answer"] in answer else 0.0


def create_dataset(name, seed, size, **options):
    return Dataset(name, seed, size, **options)
