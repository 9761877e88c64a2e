"""A model that the training loop has sharded over two ranks gives the bytes and the weights of a whole one."""

from pathlib import Path

import pytest
from loopback import NewRun, assert_all_agree
from test_cluster import two_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FSDP_LOOP = Path(__file__).resolve().parents[2] / "examples" / "fsdp_loop.py"

SHARD = {
    "rows": "fully_shard(model[0]); fully_shard(model)",
    "columns": "fully_shard(model, shard_placement_fn=lambda p: Shard(1 if p.ndim > 1 and p.shape[1] % 2 == 0 else 0))",
    "replicas": "fully_shard(model, mesh=init_device_mesh('cpu', (2, 1), mesh_dim_names=('copies', 'shards')))",
    "tensor parallel": """parallelize_module(
            model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )""",
}

BOTH_WAYS = """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        from farloop.algo import fragments
        from farloop.node.replica import Replica
        from farloop.node.shards import Shards
        from farloop.quant.registry import codec_named

        def build():
            inner = nn.Linear(23, 38, bias=False)
            model = nn.Sequential(nn.Linear(42, 23), nn.Tanh(), inner, nn.Tanh(), nn.Linear(38, 3))
            model[2].weight.requires_grad_(FROZEN)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
            return model.to(torch.DTYPE)

        fragments.MAX_FRAGMENT_ELEMENTS = 512  # so that tensors are split between rows
        model, whole = build(), build()
        shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(model)]
        layout = partition(shapes, pattern="whole")
        SHARD_IT
        parameters = dict(trainable_tensors(model))
        shards = Shards(cluster, model, layout, parameters, lambda module: 0.5)
        differ = []
        if cluster.leads:
            ours = Replica(model, layout, gradients=False, shards=shards)
            theirs = Replica(whole, layout, gradients=False)
            generator = torch.Generator().manual_seed(2)
            for fragment in layout.fragments:
                index = fragment.index
                anchor = theirs.first(index)
                assert torch.equal(ours.first(index), anchor)
                with torch.no_grad():
                    anchor.add_(torch.randn(anchor.shape, generator=generator))
                    fragments.zero_padding_(fragment, anchor)
                    ours.anchors[index].copy_(anchor), theirs.anchors[index].copy_(anchor)
                if not torch.equal(ours.take(index), theirs.take(index)):
                    differ.append(f"delta of {index}")
                codec = codec_named("q4")
                packed = [torch.zeros(codec.payload_bytes(fragment), dtype=torch.uint8) for _ in range(2)]
                done = [replica.pack(index, codec, payload, 3) for replica, payload in zip((ours, theirs), packed)]
                if done[0] != done[1] or not torch.equal(*packed):
                    differ.append(f"payload of {index}")
                for mix in (0.5, 0.0):
                    ours.merge(index, mix), theirs.merge(index, mix)
                    if not torch.equal(ours.take(index), theirs.take(index)):
                        differ.append(f"weights of {index} merged with {mix}")
            with torch.no_grad():
                for replica in (ours, theirs):
                    for anchor in replica.anchors.values():
                        anchor.mul_(2.0)
            before = [ours.take(fragment.index).clone() for fragment in layout.fragments]
            with ours.anchors_in_place():
                loss = shards.lead_evaluate()
                if any(ours.take(fragment.index).any() for fragment in layout.fragments):
                    differ.append("anchors in place")
            if loss != 0.5 or any(
                not torch.equal(ours.take(fragment.index), was) for fragment, was in zip(layout.fragments, before)
            ):
                differ.append("weights after an evaluation")
            shards.lead_go_on()
        else:
            shards.follow()
        local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
        total = sum(p.numel() for p in whole.parameters())
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "other"))
        mine = Cluster.from_torchrun(mesh["data"]).mine((5, 6, 7, 8))
        tell(mine=mine, differ=differ, fragments=len(layout.fragments), local=local, all=total)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", SHARD)
def test_deltas_payloads_and_merged_weights_are_those_of_one_process(
    tmp_path: Path, placement: str, dtype: str
) -> None:
    frozen = "True" if placement == "tensor parallel" else "False"
    script = BOTH_WAYS.replace("SHARD_IT", SHARD[placement]).replace("DTYPE", dtype).replace("FROZEN", frozen)
    first, second = two_ranks(tmp_path, script)
    assert first["differ"] == []
    assert first["fragments"] > 3
    assert first["mine"] == second["mine"] == [5, 6, 7, 8], "both ranks work on the same samples"
    if placement != "replicas":
        assert max(first["local"], second["local"]) < 0.7 * first["all"], "no rank holds the model"


def test_a_sharded_node_and_a_whole_one_train_one_model(new_run: NewRun) -> None:
    run = new_run(steps=60, method="streaming", h=10, tau=2, evaluate_every_rounds=1)
    run.tables["run"] |= {"init": str(run.folder / "own.safetensors")}
    del run.tables["run"]["model"], run.tables["data"]
    assert run.until_ended(run.start("init", str(FSDP_LOOP), "init", "own.safetensors")) == 0
    run.start_coordinator()
    address = f"tcp://127.0.0.1:{run.port}"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run.start("node-sharded", *torchrun, str(FSDP_LOOP), "train", address, "sharded")
    run.start("node-whole", str(FSDP_LOOP), "train", address, "whole")
    status = run.until_done()
    assert_all_agree(run, status, "sharded", "whole")
    assert [node["inner_steps"] for node in status["nodes"]] == [60, 60]
    assert [node["lost_steps"] for node in status["nodes"]] == [0, 0]
    losses = [event["loss"] for event in run.events("progress") if event["loss"] is not None]
    assert losses[-1] < 5.0, losses  # 5.5 and more before training
    scores = [event["loss"] for event in run.events("evaluation")]
    assert scores[-1] < 5.0, scores
