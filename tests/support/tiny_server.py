"""A server in vLLM's words that samples from a tiny policy, reading messages and media as such a server would.

Nothing of what makes prompts and messages here is used: the processor is asked directly.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers.video_utils import VideoMetadata

from tests.support.odd_server import OddServer, Reply
from tests.support.vllm_engine import Worker
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, Rollout

SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
CACHES = ("prefix", "mm", "encoder")
TRANSFER = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
# transformers loads one model at a time.
_LOADING = threading.Lock()
# What no request may set by vLLM's default (--trust-request-mm-kwargs).
UNTRUSTED = ("media_io_kwargs", "mm_processor_kwargs")


class _WithRuledOut(Policy):
    """A policy that never samples tokens a request's ``logit_bias`` names."""

    ruled_out: tuple[int, ...] = ()

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        return (*super().media_token_ids, *self.ruled_out)


class TinyServer(OddServer):
    def __init__(self, model: Path):
        self._policy = load_policy(model, device="cpu")
        self._policy_lock = threading.RLock()
        super().__init__()

    def reply(self, body: dict[str, Any]) -> Reply:
        with self._policy_lock:
            number, self.requests = self.requests, self.requests + 1
            for name in UNTRUSTED:
                if body.get(name):
                    error = {"message": f"Per-request {name} are disabled by default", "code": 400}
                    return Reply({"error": error}, body, 400)
            prompt = self._prompt(body)
            choices = [
                choice | {"message": {"role": "assistant", "content": answer.text}}
                for answer, choice in self._sampled(prompt, body)
            ]
            value = {"object": "chat.completion", "choices": choices, "prompt_token_ids": prompt.input_ids.tolist()}
            reply = Reply(value, body)
            change = self.next_reply(number)
        if change is not None:
            change(reply)
        return reply

    def _sampled(self, prompt: Prompt, fields: dict[str, Any]) -> list[tuple[Rollout, dict[str, Any]]]:
        """Rollouts, and what a choice says of each."""
        settings = RolloutSettings(
            num_generations=fields.get("n", 1),
            max_new_tokens=fields["max_tokens"],
            min_new_tokens=fields["min_tokens"],
            top_k=max(0, fields["top_k"]),
            **{name: fields[name] for name in SAMPLING},
        )
        self._policy.__class__ = _WithRuledOut
        self._policy.ruled_out = tuple(map(int, fields.get("logit_bias") or {}))
        (answers,) = RolloutEngine(self._policy, settings, seed=fields["seed"]).generate([prompt], 0)
        return [
            (
                answer,
                {
                    "index": index,
                    "finish_reason": answer.finish_reason,
                    "token_ids": answer.token_ids.tolist(),
                    "logprobs": {"content": [{"logprob": min(0.0, v)} for v in answer.rollout_logprobs.tolist()]},
                },
            )
            for index, answer in enumerate(answers)
        ]

    def _prompt(self, body: dict[str, Any]) -> Prompt:
        processor = self._policy.processor
        images: list[torch.Tensor] = []
        videos: list[torch.Tensor] = []
        rates: list[float] = []
        turns = []
        for message in body["messages"]:
            content = message["content"]
            if isinstance(content, list):
                content = [self._part(part, images, videos, rates) for part in content]
            turns.append({"role": message["role"], "content": content})
        text = processor.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
        )
        return self._of_text(text, images, videos, rates)

    def _of_text(
        self,
        text: str,
        images: list[torch.Tensor],
        videos: list[torch.Tensor],
        rates: list[float],
        begun: Sequence[int] = (),
    ) -> Prompt:
        """The prompt that the text reads with these media, and behind it the tokens of a response."""
        processor, media = self._policy.processor, dict[str, Any]()
        if images:
            media |= {"images": images, "images_kwargs": {"do_resize": False}}
        if videos:
            known = [
                VideoMetadata(total_num_frames=len(video), fps=rate, frames_indices=[*range(len(video))])
                for video, rate in zip(videos, rates, strict=True)
            ]
            rest = {"do_resize": False, "do_sample_frames": False, "video_metadata": known}
            media |= {"videos": videos, "videos_kwargs": rest}
        inputs = processor(text=[text], return_tensors="pt", **media)
        for name, values in (("input_ids", begun), ("attention_mask", [1] * len(begun))):
            inputs[name] = torch.cat([inputs[name], torch.tensor([[*values]], dtype=torch.long)], 1)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(begun)))
        return prompt_from_processor(inputs, self._policy.positions, "asked")

    def _part(
        self, part: dict[str, Any], images: list[torch.Tensor], videos: list[torch.Tensor], rates: list[float]
    ) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        content = io.BytesIO(base64.b64decode(part[part["type"]]["url"].partition(",")[2]))
        if part["type"] == "image_url":
            images.append(torch.from_numpy(np.asarray(Image.open(content)).transpose(2, 0, 1).copy()))
            return {"type": "image"}
        with av.open(content) as container:
            rates.append(float(container.streams.video[0].average_rate))
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        videos.append(torch.from_numpy(frames.transpose(0, 3, 1, 2).copy()))
        return {"type": "video"}


class WeightServer(TinyServer):
    """And loads weights as vLLM does in its development mode; misbehaving as it is set to.

    ``loads``: whether loading changes the weights. ``before_control``: called with the path of every request that is no
    completion, before it is handled; it may return another reply. ``is_slow``: called with each request for tokens; a
    slow one is half done when the server is paused, for which it waits ``slow_seconds`` at most. ``sampled_by_token``:
    text of each response of such requests, and which version sampled each of its tokens.
    """

    def __init__(self, model: Path):
        self.asleep = set[str]()
        self.loads, self.version, self.adapters = True, "default", dict[str, Policy]()
        self.before_control: Callable[[str], Reply | None] = lambda path: None
        self.controlled: list[str] = []
        self.is_slow: Callable[[dict[str, Any]], bool] = lambda body: False
        self.slow_seconds = 60.0
        self.sampled_by_token = set[tuple[str, tuple[str, ...]]]()
        self._versions_of = dict[tuple[int, ...], tuple[str, ...]]()
        self.paused, self.pauses, self.interrupted = threading.Event(), threading.Condition(), 0
        self.worker = Worker()
        super().__init__(model)
        self._initial = model
        paths = ("/collective_rpc", "/update_weight_version", "/weight_info", *map("/reset_{}_cache".format, CACHES))
        paths += ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up")
        paths += ("/pause", "/resume", "/inference/v1/generate")
        paths += ("/get_world_size", *map("/{}".format, TRANSFER))
        self.schema = Reply({"paths": {path: {} for path in paths}}, {})

    def restart(self) -> None:
        """With the weights it was started with."""
        self._load(self._initial)
        self.worker.stop()
        self.worker = Worker()
        self.version, self.adapters, self.asleep = "default", {}, set()
        self._pause(False)
        self._list()

    def control(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/openapi.json":
            return super().control(path, body)
        if path == "/inference/v1/generate":
            return self.generate(body)
        self.controlled.append(path)
        if (other := self.before_control(path)) is not None:
            return other
        if path == "/weight_info":
            return Reply({"weight_version": self.version}, body)
        if path == "/get_world_size":
            return Reply({"world_size": 1}, body)
        if path in ("/pause?mode=abort", "/resume"):
            self._pause(path != "/resume")
            return Reply({}, body)
        if path.removeprefix("/") in TRANSFER:
            return self._transfer(path, body)
        if path == "/update_weight_version":
            with self._policy_lock:
                self.version = body["new_version"]
            return Reply({"success": True}, body)
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights" and "weights" not in self.asleep
            folder = Path(body["kwargs"]["weights_path"])
            if not folder.is_dir():
                return Reply({"error": f"Cannot find any model weights with {folder}"}, body, 500)
            if self.loads:
                self._load(folder)
            return Reply({"results": [None]}, body)
        if path.startswith("/sleep"):
            self.asleep = {"weights", "kv_cache"}
            if path.endswith("2"):
                self._load(self._initial)
        if path.startswith("/wake_up"):
            self.asleep -= {path.rpartition("=")[2]} if "=" in path else self.asleep
        if path == "/v1/load_lora_adapter":
            folder = Path(body["lora_path"])
            rank = json.loads((folder / "adapter_config.json").read_text())["r"]
            settings = ModelSettings(path=str(folder), lora=LoraSettings(rank=rank))
            self.adapters[body["lora_name"]] = load_policy(folder, device="cpu", settings=settings)
            self._list()
            return Reply({}, body, body=b"Success: LoRA adapter added")
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            self._list()
        return Reply({}, body, body=b"")

    def reply(self, body: dict[str, Any]) -> Reply:
        if self.asleep:
            return Reply({"error": {"message": "it is asleep"}}, body, 400)
        if body["model"] == "tiny":
            return super().reply(body)
        if body["model"] not in self.adapters:
            return Reply({"error": {"message": f"The model {body['model']} does not exist."}}, body, 404)
        with self._policy_lock:
            base, self._policy = self._policy, self.adapters[body["model"]]
            reply = super().reply(body)
            self._policy = base
        return reply

    def generate(self, body: dict[str, Any]) -> Reply:
        """Tokens in, tokens out."""
        tokenizer, fields = self._policy.tokenizer, body["sampling_params"]
        ids, turn = body["token_ids"], tokenizer("<|im_start|>assistant\n")["input_ids"]
        # A response may have such tokens too: what rules them out is not followed here.
        end = next(end for end in range(len(ids) + 1) if ids[:end][-len(turn) :] == turn)
        text, begun = tokenizer.decode(ids[:end]), ids[end:]
        images, videos, rates = list[torch.Tensor](), list[torch.Tensor](), list[float]()
        for part in body["content_parts"] or ():
            self._part({"type": part["type"], part["type"]: {"url": part["url"]}}, images, videos, rates)
        prompt, choices = self._of_text(text, images, videos, rates, begun), list[dict[str, Any]]()
        while not choices:
            with self.pauses:
                self.pauses.wait_for(lambda: not self.paused.is_set())
            with self._policy_lock:
                if not self.paused.is_set():
                    pause, version = self.interrupted, self.version
                    choices = [choice for _, choice in self._sampled(prompt, fields)]
        is_cut = self.is_slow(body)
        if is_cut:
            with self.pauses:
                is_cut = self.pauses.wait_for(lambda: self.interrupted > pause, self.slow_seconds)
        for choice in choices:
            if is_cut:
                count = len(choice["token_ids"]) // 2
                choice |= {"token_ids": choice["token_ids"][:count], "finish_reason": "abort"}
                choice["logprobs"] = {"content": choice["logprobs"]["content"][:count]}
            count = len(choice["token_ids"])
            choice["weight_versions"] = [{"version": version, "start": 0, "end": count}]
            whole = (*begun, *choice["token_ids"])
            versions = (*self._versions_of.get(tuple(begun), ()), *[version] * count)
            if is_cut:
                self._versions_of[whole] = versions
            else:
                said = tokenizer.decode(whole[:-1] if choice["finish_reason"] == "stop" else whole)
                self.sampled_by_token.add((said, versions))
        return Reply({"choices": choices, "prompt_token_ids": prompt.input_ids.tolist()}, body)

    def _pause(self, is_paused: bool) -> None:
        with self._policy_lock, self.pauses:
            (self.paused.set if is_paused else self.paused.clear)()
            self.interrupted += 1
            self.pauses.notify_all()

    def _transfer(self, path: str, body: dict[str, Any]) -> Reply:
        worker = self.worker
        try:
            worker.call(path, body)
        except Exception as error:
            return Reply({"error": str(error)}, body, 500)
        if path == "/finish_weight_update" and self.loads and worker.model.tensors:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(self._initial, folder, dirs_exist_ok=True)
                save_file(worker.model.tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
                self._load(Path(folder))
        return Reply({"message": "done"}, body)

    def _list(self) -> None:
        self.models = {"data": [{"id": name, "owned_by": "vllm"} for name in ("tiny", *self.adapters)]}

    def _load(self, folder: Path) -> None:
        with self._policy_lock, _LOADING:
            self._policy = load_policy(folder, device="cpu")
