"""Planning: what a training run asks of its storage, worked out by pure functions from frozen inputs.

from stepwell.plan import Layout, Question, answer, models, state, tiers

layout = Layout(512)
plan = answer(Question(models.from_text("llama3-70b"), state.recipe_named("adamw-bf16"), layout,
                       tuple(tiers.tiers_named("nvme+parallel", layout.nodes)), rpo_seconds=600.0))
plan.interval_seconds, plan.goodput_fraction, plan.ledger["state_bytes"]
"""

from stepwell.plan import models, state, tiers
from stepwell.plan.bill import Plan, Question, answer
from stepwell.plan.layout import Layout

__all__ = ["Layout", "Plan", "Question", "answer", "models", "state", "tiers"]
