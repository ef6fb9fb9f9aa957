"""What a client's script reports: checks that passed, and requests that were refused as expected."""

import contextlib
import json
import traceback


class Checks:
    """Report of one client."""

    def __init__(self):
        self.passed, self.refused, self.failed = [], [], {}

    @contextlib.contextmanager
    def passing(self, name):
        """Record whether the block passes; the script goes on either way."""
        try:
            yield
            self.passed.append(name)
        except Exception:
            self.failed[name] = traceback.format_exc()[-3000:]

    def expect_refusal(self, name, error, call):
        """Record that a call is refused with this error."""
        try:
            call()
            self.failed[name] = "was not refused"
        except error:
            self.refused.append(name)
        except Exception:
            self.failed[name] = traceback.format_exc()[-3000:]

    def print_report(self):
        """Print the report as the last line."""
        report = {"passed": self.passed, "refused": self.refused, "failed": self.failed}
        print("\n" + json.dumps(report))
