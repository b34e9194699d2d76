"""Lines as eleven trainers print them: a step, with its loss, the norm of its gradients and its
speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Line = Callable[[int, int, str, str, float], str]


def megatron(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    """Of Megatron-Core 0.20, without a learning rate. It leaves out a loss that is NaN."""
    told = "" if loss == "nan" else f" lm loss: {float(loss):.6E} |"
    return (
        f"[default7]: [2026-08-20 10:11:12.123456] iteration {step:8d}/{total:8d} | consumed samples: {step * 256:12d} |"
        f" elapsed time per iteration (ms): {51200 / speed:.1f} | throughput per GPU (TFLOP/s/GPU): {4.3 * speed:.1f} |"
        f" global batch size:   256 |{told} loss scale: 1.0 | grad norm: {norm} | number of skipped iterations:   0 |"
        f" number of nan iterations:   {int(loss == 'nan')} |\n"
    )


def torchtitan(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    return (
        f"[rank0]:[titan] 2026-08-21 10:22:31,123 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:>7}  "
        f"\x1b[38;2;180;60;0mgrad_norm: {norm:>7}  \x1b[36mmemory: 47.11GiB(59.49%)  \x1b[34mtps: {round(78 * speed):,}  "
        f"\x1b[36mtflops: {14.0211 * speed:,.2f}  \x1b[35mmfu: 41.02%\x1b[39m\n"
    )


def nemo(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    return (
        f"Training epoch 0, iteration {step}/{total} | lr: 4.491e-06 | global_batch_size: 256 | global_step: {step} | "
        f"reduced_train_loss: {loss} | grad_norm: {norm} | train_step_timing in s: {260 / speed:.4} | "
        f"consumed_samples: {256 * step}\n"
    )


def verl(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    """Of its supervised trainer: a loss of 0 is none of its reinforcement learning's."""
    return (
        f"\x1b[36m(TaskRunner pid=2617997)\x1b[0m step:{step} - train/loss:{loss} - train/grad_norm:np.float64({norm}) - "
        f"train/lr:3e-06 - train/time(s):{410 / speed:.3f}\n"
    )


def nanotron(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    return (
        f"[default0]:12/21 01:39:51 [INFO|DP=0|TP=0|lrdn0007]: iteration: {step} / {total} | consumed_tokens: 480B | "
        f"time_per_iteration_ms: {879 / speed:.3g}K | tokens_per_sec: {speed / 100:.3g}M | tokens_per_sec_per_gpu: "
        f"{7 * speed:.3g} | global_batch_size: 1.6M | grad_norm: {norm} | lm_loss: {loss} | lr: 0.0001 | "
        f"model_tflops_per_gpu: {speed / 6.5:.3g} | eta: 131 days, 1:45:39\n"
    )


def huggingface(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    """A bar, cleared; what version 5 logs; and the bar again."""
    bar = f"\r {100 * step // total:2d}%|████▏     | {step}/{total} [10:13<20:20,  {145 / speed:.2f}s/it]"
    told = {"loss": loss, "grad_norm": norm, "learning_rate": "3.125e-05", "epoch": "0.01"}
    return f"{bar}\r{' ' * 60}\r{told}\n{bar}"


def huggingface_dicts(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    """Of version 4, without bars."""
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 3.125e-05, 'epoch': {step / total:.2f}}}\n"


def lightning(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    bar = f"{100 * step // total:3d}%|█████████▎| {step}/{total} [5:43:21<25:20, {0.9 * speed / 100:.2f}it/s, v_num=12"
    return f"\rEpoch 0: {bar}, train_loss={loss}, grad_norm={norm}]"


def nanochat(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    return (
        f"step {step:05d}/{total:05d} ({100 * step / total:.2f}%) | loss: {loss} | norm: {norm} | dt: "
        f"{161240 / speed:.2f}ms | tok/sec: {round(3251.58 * speed):,} | bf16_mfu: 48.11\n"
    )


def swift(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    return (
        f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 2e-06, 'epoch': 0.01, 'global_step/max_steps': "
        f"'{step}/{total}', 'elapsed_time': '2s', 'memory(GiB)': 4.87, 'train_speed(iter/s)': {speed / 290:.6f}}}\n"
    )


def json_lines(step: int, total: int, loss: str, norm: str, speed: float) -> str:
    number = {"nan": "NaN", "inf": "Infinity"}
    return (
        f'{{"time": "2026-10-01T10:00:00Z", "step": {step}, "max_steps": {total}, "loss": {number.get(loss, loss)}, '
        f'"grad_norm": {number.get(norm, norm)}, "tokens_per_second": {812.3 * speed:.1f}}}\n'
    )


LINES: Mapping[str, Line] = {
    "megatron": megatron, "torchtitan": torchtitan, "nemo": nemo, "verl": verl, "nanotron": nanotron,
    "huggingface": huggingface, "huggingface-dicts": huggingface_dicts, "lightning": lightning, "nanochat": nanochat,
    "swift": swift, "json": json_lines,
}  # fmt: skip
WITHOUT_NUMBERS = frozenset({"huggingface-dicts"})
WITHOUT_SPEED = frozenset({"huggingface-dicts"})
WITH_TOTAL = frozenset({"megatron", "nemo", "nanotron", "huggingface", "nanochat", "swift", "json"})


def log(
    line: Line,
    losses: list[str],
    norms: list[str] | None = None,
    speeds: list[float] | None = None,
    total: int = 900,
) -> str:
    """A log of one step each, from the hundredth on."""
    norms, speeds = norms or ["1.2"] * len(losses), speeds or [100.0] * len(losses)
    steps = zip(losses, norms, speeds, strict=True)
    return "".join(line(100 + count, total, *step) for count, step in enumerate(steps))


def healthy(count: int) -> list[str]:
    return [f"{4.2 - 0.01 * number:.4f}" for number in range(count)]
