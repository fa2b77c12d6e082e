"""What the strategies say about their own rules: versions they were not read in, optimizers that no test compares."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest

from launchguard.job import DdpSpec, JobSpec, LaunchSpec, LoraSpec, ModelSpec, OptimizerSpec
from launchguard.strategies import read_in, with_notes

JOB = JobSpec(LaunchSpec("torchrun", (), ".", "train.py"), ModelSpec("tiny"), strategy="zero", loop="sft", lora=LoraSpec())


def test_versions_that_differ_are_noted() -> None:
    versions = {"torch": "2.14.1+cu130", "deepspeed": "0.19.80", "accelerate": "1.15.3", "transformers": "5.24", "trl": "1.2.0"}
    job = with_notes(replace(JOB, versions=versions))
    assert [(n.code, n.severity, n.origin) for n in job.notes] == [
        ("LG330", "info", "torch 2.14.1+cu130"), ("LG330", "info", "deepspeed 0.19.80"), ("LG330", "info", "trl 1.2.0")
    ]  # fmt: skip
    assert "read in 0.19.8:" in job.notes[1].message
    assert with_notes(job) == job


def test_only_libraries_that_matter_are_looked_at() -> None:
    plain = replace(JOB, strategy="ddp", loop="torch", lora=None, versions={"transformers": "4.0.0", "deepspeed": "0.1", "peft": "0.1"})
    assert not with_notes(plain).notes


def test_the_rules_were_read_in_what_the_suites_run() -> None:
    """Conformance is shown for these versions; an upgrade of the test environment must be followed by READ_IN."""
    for library, version in read_in(JOB).items():
        try:
            assert f"{metadata.version(library).partition('+')[0]}.".startswith(f"{version}."), library
        except metadata.PackageNotFoundError:
            pytest.skip(f"{library} is not installed")


def test_an_optimizer_without_a_test_is_noted() -> None:
    (note,) = with_notes(replace(JOB, optimizer=OptimizerSpec("galore_adamw", "for_loop"))).notes
    assert note.code == "LG331" and "upper bound" in note.message
    assert not with_notes(replace(JOB, optimizer=OptimizerSpec("lion_8bit", "fused"))).notes


def test_a_communication_hook_without_rules_is_noted() -> None:
    job = replace(JOB, strategy="ddp", loop="torch", lora=None)
    (note,) = with_notes(replace(job, ddp=DdpSpec(comm_hook="batched_power_sgd"))).notes
    assert (note.code, note.severity) == ("LG332", "warning")
    assert not with_notes(replace(job, ddp=DdpSpec(comm_hook="bf16"))).notes
