"""When the tokens of one answer came, and what that says of its two steps. Terms as in the README."""

from time import perf_counter


class Statistics:
    """A request arrives when its model is loaded; each of its tokens is reported when it leaves the engine."""

    def __init__(self) -> None:
        self._load_s = 0.0
        self._engine = ""
        self._prompt_tokens = 0
        self._arrival_s = 0.0
        self._times_s: list[float] = []

    def loaded(self, load_s: float, prompt_tokens: int) -> None:
        self._load_s, self._prompt_tokens, self._arrival_s = load_s, prompt_tokens, perf_counter()

    def native(self, file_bytes: int, weight_bytes: int, kv_bytes: int, isa: str, threads: int) -> None:
        """What the native executor made of the file."""
        sizes = f"weights {_mib(file_bytes)} in the file, {_mib(weight_bytes)} repacked in memory"
        self._engine = f"engine   {isa}, {threads} threads; {sizes}; KV cache {_mib(kv_bytes)}\n"

    def token(self) -> None:
        self._times_s.append(perf_counter())

    def report(self) -> str:
        """One line for each step, the load before them. The first token comes from prefill: decode made the others."""
        load = f"{self._engine}load     {self._load_s:.3f} s"
        if not self._times_s:
            return f"{load}\nthe model ended its answer at once"
        ttft_s = self._times_s[0] - self._arrival_s
        rate = self._prompt_tokens / ttft_s
        prefill = f"prefill  {self._prompt_tokens} tokens, TTFT {ttft_s:.3f} s, {rate:.0f} tokens/s"
        return "\n".join([load, prefill, *self._decode()])

    def _decode(self) -> list[str]:
        """TPOT is undefined for one token."""
        count = len(self._times_s) - 1
        if count == 0:
            return []
        tpot_s = (self._times_s[-1] - self._times_s[0]) / count
        return [f"decode   {count} tokens, TPOT {1000 * tpot_s:.1f} ms, {1 / tpot_s:.0f} tokens/s"]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
