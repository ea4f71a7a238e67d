"""Seeds of collections: one for each prompt and answer, without collisions."""

from hashlib import sha1
from zlib import crc32

import pytest

from data.text.tokenizer import train_tokenizer
from decoding.collectors.answers import TeacherAnswers
from decoding.collectors.trajectories import JacobiTrajectories
from decoding.engine.randomness import derived_seed

IDS = [sha1(str(i).encode()).hexdigest() for i in range(200_000)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    train_tokenizer(["ab"], 257).save_pretrained(folder)
    return str(folder)


def test_no_two_prompts_share_a_seed(teacher):
    answers = TeacherAnswers(teacher, 2, [0.0, 1.0], max_new_tokens=8, seed=3)
    found = {answers.seed_of(x, j) for x in IDS for j in range(2)}
    assert len(found) == 2 * len(IDS)
    trajectories = JacobiTrajectories(teacher, block_size=4, max_new_tokens=8, seed=3)
    assert len({trajectories.seed_of(x) for x in IDS}) == len(IDS)


def test_a_32_bit_hash_makes_some_share():
    """Negative control of the test above."""
    assert len({crc32(f"3/{x}".encode()) for x in IDS}) < len(IDS)


def test_a_seed_depends_on_all_of_its_parts(teacher):
    def seed_of(seed, prompt, answer):
        return TeacherAnswers(teacher, 2, [0.0], max_new_tokens=8, seed=seed).seed_of(
            prompt, answer
        )

    assert len({seed_of(s, x, j) for s in (0, 1) for x in ("a", "b") for j in (0, 1)}) == 8
    assert seed_of(3, "a", 0) == derived_seed(3, "a", 0)


def test_a_manifest_names_how_seeds_are_derived(teacher):
    """Collections with seeds of another kind are not continued (`decoding.collect`)."""
    answers = TeacherAnswers(teacher, 1, [0.0], max_new_tokens=8, seed=3)
    assert answers.made_with()["seeds"] == "blake2b"
