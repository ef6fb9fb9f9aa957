"""The base class of models that encode texts themselves."""


class TemplateLM:
    def loglikelihood(self, requests):
        """Score continuations: the whole text is encoded, and split at the length of the encoded context."""
        encoded = []
        for request in requests:
            context, continuation = request.args
            whole, start = self.tok_encode(context + continuation), self.tok_encode(context)
            encoded.append((request.args, start, whole[len(start) :]))
        return self._loglikelihood_tokens(encoded)
