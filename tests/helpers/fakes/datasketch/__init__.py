"""A stand-in for datasketch: sets instead of sketches, so every pair that shares a shingle is a candidate."""


class MinHash:
    def __init__(self, num_perm=128, seed=1, hashfunc=None):
        self.parts = set()

    def copy(self):
        copied = MinHash()
        copied.parts = set(self.parts)
        return copied

    def update_batch(self, parts):
        self.parts |= set(parts)


class MinHashLSH:
    def __init__(self, threshold=0.9, num_perm=128):
        self.threshold, self.known = threshold, {}

    def insert(self, key, sketch):
        if key in self.known:
            raise ValueError("The given key already exists")
        self.known[key] = sketch.parts

    def query(self, sketch):
        return [key for key, parts in self.known.items() if parts & sketch.parts]
