"""Plain decoding's exact distribution with a tiny model, and other answers' distance from it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 6
TARGET, DRAFTER = 0, 1  # seeds of the weights of the two tiny models
# It repeats itself, so that prompt lookup finds something to copy.
PROMPT = (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)
SAME = 1e-5  # total variation up to which an enumerated distribution is plain decoding's (float32)
ALPHA = 0.001  # of the chi-square test: a right program fails it once in a thousand audits
POWER = 0.99  # with which the stated distance is found
LEAST = 5  # expected answers of a cell; rarer answers share one


def tiny_model(seed: int) -> PreTrainedModel:
    """Make a random float32 Llama with VOCABULARY tokens and no end-of-text token."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of a size that serving engines run
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, p.shape[1] ** -0.5)
    return model.eval()


@torch.no_grad()
def exact_distribution(
    model: PreTrainedModel, prompt: tuple[int, ...], new: int, temperature: float
) -> Tensor:
    """Return plain decoding's distribution over answers, by one forward of all possible answers.

    It is float64 [V^n] for answers of n = `new` tokens; an answer's index is its number in base V
    (`index_of`). The temperature is above 0.
    """
    V = model.config.vocab_size
    answers = torch.tensor([*itertools.product(range(V), repeat=new)])
    ids = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers], 1)
    logits = model(ids).logits[:, len(prompt) - 1 : -1].double()
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, answers[..., None]).sum((1, 2)).exp()


def index_of(answer: list[int], vocabulary: int = VOCABULARY) -> int:
    """Return the index of an answer in `exact_distribution`.

    >>> index_of([1, 0, 2], 3)
    11
    """
    return int(np.ravel_multi_index(answer, [vocabulary] * len(answer)))


class Enumerator:
    """Randomness that enumerates every outcome; a program takes it in place of a generator.

    The program runs once for each path of outcomes; the paths' probabilities sum to 1.
    """

    def __init__(self):
        self._path: list[tuple[int, list[float]]] = []
        self._at, self.weight = 0, 1.0

    def categorical(self, probs) -> int:
        """Return an index drawn with these probabilities."""
        if self._at == len(self._path):
            p = [float(x) for x in probs]
            p = [x / sum(p) for x in p]  # as generators do
            self._path.append((next(i for i, x in enumerate(p) if x > 0), p))
        choice, p = self._path[self._at]
        self._at += 1
        self.weight *= p[choice]
        return choice

    def accept(self, prob) -> bool:
        """Return True with this probability."""
        p = min(max(float(prob), 0.0), 1.0)
        return self.categorical([1 - p, p]) == 1

    def next_path(self) -> bool:
        """Go on to the next path; return False after the last one."""
        self._at, self.weight = 0, 1.0
        while self._path:
            choice, p = self._path.pop()
            if later := [i for i in range(choice + 1, len(p)) if p[i] > 0]:
                self._path.append((later[0], p))
                return True
        return False


def enumerate_answers(program: Callable[[Enumerator], list[int]], size: int) -> Tensor:
    """Return the exact distribution, float64 [size], of a program that decodes one answer."""
    randomness, found = Enumerator(), torch.zeros(size, dtype=torch.double)
    more = True
    while more:
        answer = program(randomness)
        found[index_of(answer)] += randomness.weight
        more = randomness.next_path()
    return found


@dataclass(frozen=True)
class Finding:
    """An audit's result for one program.

    Attributes:
        distance: Total variation from plain decoding, exact or of the sample.
        samples: Number of answers drawn; 0 if all were enumerated, and then nothing below is set.
        p: p-value of the chi-square test.
        expected: The distance that a correct program's sample has on average.
        found: The least total variation that is found with probability POWER at this sample size.
    """

    distance: float
    samples: int = 0
    p: float = 1.0
    expected: float = 0.0
    found: float = 0.0

    @property
    def lossless(self) -> bool:
        """Return whether the program passes."""
        return self.p >= ALPHA if self.samples else self.distance <= SAME

    def __str__(self) -> str:
        if not self.samples:
            return f"total variation {self.distance:.2g} from plain decoding, by enumeration"
        return (
            f"{self.samples} answers, total variation {self.distance:.3f} (a right program's "
            f"sample: {self.expected:.3f}), p = {self.p:.2g}; a distance of {self.found:.3f} is "
            f"found with probability {POWER}"
        )


def chi_square(answers: list[int], exact: Tensor) -> Finding:
    """Test the indices of sampled answers against a distribution, float64 [size].

    The test is Pearson's chi-square, with rare answers pooled, which can hide only what happens
    among them. `found` follows from Cauchy-Schwarz: answers at a total variation of d have a
    chi-square divergence of at least 4 d^2, so a test of n answers has a noncentrality of at least
    4 d^2 n.
    """
    from scipy import optimize, stats

    n, exact = len(answers), exact.numpy()
    counts = np.bincount(answers, minlength=len(exact))
    kept = exact * n >= LEAST
    seen, wanted = counts[kept], n * exact[kept]
    if n - wanted.sum() >= LEAST:
        seen, wanted = np.append(seen, n - seen.sum()), np.append(wanted, n - wanted.sum())
    statistic, degrees = ((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1
    critical = stats.chi2.isf(ALPHA, degrees)
    noncentral = optimize.brentq(lambda x: stats.ncx2.sf(critical, degrees, x) - POWER, 1e-6, 1e4)
    draws = np.random.default_rng(0).multinomial(n, exact / exact.sum(), 200) / n
    return Finding(
        distance=float(np.abs(counts / n - exact).sum() / 2),
        samples=n,
        p=float(stats.chi2.sf(statistic, degrees)),
        expected=float(np.abs(draws - exact).sum(1).mean() / 2),
        found=float((noncentral / n) ** 0.5 / 2),
    )
