//! Every figure that a run reports, defined once. All views read this table: the console,
//! `metrics.jsonl`, `summary.json`, TensorBoard, comparisons, sweeps and `docs/metrics.md`.
//!
//! A new time of a step also needs a field of `StepTimes`.

use paceline_strategies::schedule::IdleCause;
use serde_json::{Value, json};

use crate::figures::figure::Better::{Higher, Lower};
use crate::figures::figure::{Figure, Source};
use crate::record::card_use::CardUse;
use crate::record::ranks::Ranks::{
    self, Each, First, Max, Mean, MeanOfSamples, Same, SlowestOfStep, SlowestRank, Sum,
};
use crate::record::times::StepTimes;

/// The figure with this name, if there is one.
pub fn find(name: &str) -> Option<&'static Figure> {
    TABLE.iter().find(|figure| figure.name == name)
}

/// A figure in a summary that was written by this version or an earlier one. A figure that the table lacks is only read.
pub fn read(name: &str, summary: &Value) -> Option<f64> {
    find(name).map_or_else(|| summary.get(name)?.as_f64(), |figure| figure.read(summary))
}

/// A figure that the console prints.
pub(crate) fn printed(name: &str) -> &'static Figure {
    find(name).expect("the table has each figure that the console prints")
}

const MS: f64 = 1e-6;

/// A label, a unit and decimals.
type Labeled = (&'static str, &'static str, usize);

/// A time of each step, which a run reports as a mean.
const fn time(
    name: &'static str,
    label: &'static str,
    of: fn(&StepTimes) -> u64,
    definition: &'static str,
) -> Figure {
    Figure::new(name, (label, "ms", 2), Mean, Source::Times(of, MS), definition).summary()
}

/// A figure of each step.
const fn step(
    name: &'static str,
    shown: Labeled,
    ranks: Ranks,
    source: Source,
    definition: &'static str,
) -> Figure {
    Figure::new(name, shown, ranks, source, definition).metrics()
}

/// A figure of a run.
const fn run(
    name: &'static str,
    shown: Labeled,
    ranks: Ranks,
    of: fn(&crate::figures::facts::Facts, Ranks) -> Value,
    definition: &'static str,
) -> Figure {
    Figure::new(name, shown, ranks, Source::Run(of), definition).summary()
}

/// A part of the idle time of a pipeline.
const fn idle(
    name: &'static str,
    label: &'static str,
    of: fn(&crate::figures::facts::Facts, Ranks) -> Value,
    definition: &'static str,
) -> Figure {
    run(name, (label, "ms", 2), Mean, of, definition)
}

/// A figure that a comparison adds to those of its runs.
const fn compared(
    name: &'static str,
    shown: Labeled,
    ranks: Ranks,
    definition: &'static str,
) -> Figure {
    Figure::new(name, shown, ranks, Source::Comparison, definition)
}

const fn plain(label: &'static str) -> Labeled {
    (label, "", 0)
}

/// All figures, in the order of files and tables.
#[rustfmt::skip]
pub static TABLE: &[Figure] = &[
    // The choices of the run.
    run("model", plain("model"), Same, |f, _| json!(f.config.model.name()), "The model.").second(),
    run("strategy", plain("strategy"), Same, |f, _| json!(f.config.strategy.name()),
        "The strategy, which keeps the replicas equal.").second(),
    run("world_size", plain("ranks"), Same, |f, _| json!(f.config.world_size), "Number of ranks.").console().second(),
    run("threads", plain("threads"), Same, |f, _| json!(f.config.threads), "Threads of a rank.").console(),
    run("device", plain("device"), Same, |f, _| json!(f.config.device), "Where ranks compute.").console(),
    run("precision", plain("precision"), Same, |f, _| json!(f.config.precision),
        "The element type of products, and of activations between them."),
    run("emulates_fp16", plain("emulates fp16"), Same, |f, _| json!(f.config.emulate_fp16),
        "Whether processors emulate fp16: numbers are those of fp16, and times say nothing about fp16."),
    run("simd", plain("held to"), Same, |f, _| json!(f.config.simd),
        "The vector instructions that ranks are held to; null if each takes the best of its processor."),
    run("transport", plain("transport"), Same, |f, _| json!(f.outcome.transport.name()),
        "How the ranks reach each other.").console().second(),
    run("link", plain("link"), Same, |f, _| json!(f.outcome.link.map(|link| link.to_string())),
        "The link that is emulated, if one is.").console(),
    run("params", plain("parameters"), Same, |f, _| json!(f.outcome.params), "Number of parameters.").console(),
    run("batch_size", plain("batch size"), Same, |f, _| json!(f.config.batch_size), "Samples of a batch on a rank."),
    run("accumulate", plain("batches"), Same, |f, _| json!(f.config.strategy.accumulate), "Batches of a step."),
    run("samples_per_step", plain("samples of a step"), Same, |f, _| json!(f.config.samples_per_step()),
        "Samples of a full optimizer step on all ranks: those of a batch on all ranks, times the batches of a step. If ranks have \
         their own shards (`--rank-samples`), the mean over an epoch.").console(),
    run("schedule", plain("schedule"), Same, |f, _| json!(f.config.pipeline.as_ref().map(|of| of.schedule)),
        "The schedule of a pipeline; null without a pipeline."),
    run("stages", plain("stages begin with"), Same, |f, _| json!(f.config.pipeline.as_ref().map(|of| &of.begins)),
        "First unit of every stage except stage 0."),
    run("class_names", plain("classes"), Same,
        |f, _| json!(Some(&f.config.class_names).filter(|names| !names.is_empty())),
        "The names of the classes, in their order; null if they have none.").console(),
    run("step_rehearsed_ms", ("rehearsed step", "ms", 2), Same,
        |f, _| json!(f.config.pipeline.as_ref().and_then(|of| of.rehearsed_ms())),
        "The step that a rehearsal with measured costs promised before the run, where `--schedule auto` or `--stages measured` chose."),
    run("steps", plain("steps"), Same, |f, _| json!(f.steps.count()),
        "Measured steps: those after `--warmup-steps`.").console(),
    run("kept_steps", plain("kept steps"), Same, |f, _| json!(f.steps.num_kept()),
        "Of the measured steps those that medians and percentiles are taken over: all up to 65,536, and a random part of \
         more, the same on all ranks."),
    run("stopped_after", plain("stopped after"), Same, |f, _| json!(f.outcome.stopped_after),
        "If the run was asked to end before its last step: the optimizer steps so far, those before a resumption included. Then \
         all figures are of these steps. Otherwise null.").console(),

    // The position of a line of metrics.jsonl.
    step("step", plain("step"), Same, Source::Position(|steps, _| steps),
        "Optimizer steps so far, those before a resumption included."),
    step("epoch", plain("epoch"), Same, Source::Position(|_, epoch| epoch), "The epoch, from 1.").curve("train/epoch"),
    step("batch", plain("batch"), Same, Source::Step(|s| Some(json!(s.batches))), "Batches of the epoch so far.").console(),

    // The results of learning.
    step("samples", plain("samples"), Sum, Source::Step(|s| Some(json!(s.loss.samples))),
        "Samples of the step; where ranks train apart, as between averages of `local_sgd`, those of rank 0."),
    step("loss", ("loss", "", 4), MeanOfSamples, Source::Step(|s| Some(json!(s.loss.loss))),
        "Mean loss of the step's samples (of its tokens with a language model), before its update. `summary.json` has `train_loss` and `eval_loss` instead; its \
         `loss` in earlier versions was either.").console().curve("train/loss"),
    step("correct", plain("correct"), Sum, Source::Step(|s| s.has_classes.then(|| json!(s.loss.correct))),
        "Samples of the step (tokens with a language model) that are classified correctly; only where the model classifies."),
    Figure::new("accuracy", ("accuracy", "", 4), MeanOfSamples,
        Source::Step(|s| s.has_classes.then(|| json!(s.loss.correct / s.loss.count as f64))),
        "The part of the step's samples (of its tokens with a language model) that is classified correctly.").curve("train/accuracy"),
    step("lr", ("learning rate", "", 6), Same, Source::Step(|s| Some(json!(s.lr))),
        "The learning rate of the step.").curve("train/learning_rate"),
    step("grad_norm", ("gradient norm", "", 4), Same, Source::Step(|s| s.grad_norm.map(Value::from)),
        "The norm of the gradients before they are clipped, without the loss scale; only where they are clipped or the loss is scaled, \
         and not where they overflow.").curve("train/grad_norm"),
    step("loss_scale", plain("loss scale"), Same, Source::Scaling(|s| json!(s.scale)),
        "The scale by which the loss of the next step is multiplied (`--loss-scale`); null or left out if the loss is not scaled.")
        .summary().curve("train/loss_scale"),
    step("skipped_steps", plain("skipped steps"), Same, Source::Scaling(|s| json!(s.skipped_steps)),
        "Steps so far whose update was skipped because gradients overflowed, those before a resumption included; null or left out if \
         the loss is not scaled.").summary().curve("train/skipped_steps"),
    run("train_loss", ("training loss", "", 4), MeanOfSamples, |f, _| json!(f.outcome.trained.map(|sums| sums.mean_loss())),
        "Mean loss of the samples of the last epoch (of their tokens with a language model), each before the update of its step.").console().first().swept(Lower)
        .elsewhere("/loss", 1.0),
    run("train_accuracy", ("training accuracy", "", 4), MeanOfSamples,
        |f, _| json!(f.outcome.trained.filter(|_| f.outcome.has_classes).map(|sums| sums.accuracy())),
        "The part of the samples of the last epoch (of their tokens with a language model) that is classified correctly, each \
         before the update of its step; null if the model does not classify.")
        .console(),
    step("eval_samples", plain("samples"), Same, Source::Evaluation(|e| Some(e.result.samples as f64)),
        "Samples of the test set.").console().summary(),
    step("eval_tokens", plain("tokens"), Sum, Source::Evaluation(|e| e.result.tokens()),
        "Tokens of the test set that have a target, over which loss and accuracy are taken; only with a language model.")
        .console().summary(),
    step("eval_loss", ("evaluation loss", "", 4), MeanOfSamples, Source::Evaluation(|e| Some(e.result.sums.mean_loss())),
        "Mean loss over the test set; in `summary.json` after the last step.")
        .console().summary().curve("evaluation/loss").first().swept(Lower),
    step("eval_perplexity", ("evaluation perplexity", "", 2), Same, Source::Evaluation(|e| e.result.perplexity()),
        "`exp(eval_loss)` of a language model: the number of equally likely tokens between which a model with this loss would \
         have to choose; null if the means are not over tokens.")
        .console().summary().curve("evaluation/perplexity"),
    step("eval_accuracy", ("evaluation accuracy", "", 4), MeanOfSamples, Source::Evaluation(|e| e.result.accuracy()),
        "The part of the test set that is classified correctly; in `summary.json` after the last step, and null there if the \
         model does not classify.")
        .console().summary().curve("evaluation/accuracy"),
    compared("eval_accuracy_pct", ("accuracy", "%", 2), MeanOfSamples, "`eval_accuracy` in percent.").first().swept(Higher)
        .elsewhere("/eval_accuracy", 100.0),
    compared("train_accuracy_pct", ("training accuracy", "%", 2), MeanOfSamples, "`train_accuracy` in percent.").second()
        .elsewhere("/train_accuracy", 100.0),

    // Speed.
    run("total_s", ("time", "s", 2), First, |f, _| json!(f.outcome.total.as_secs_f64()),
        "Wall-clock time of the whole run.").console().second().swept(Lower),
    run("samples_per_s", ("samples/s", "", 0), SlowestRank, |f, ranks| json!(f.steps.samples_per_s(ranks)),
        "Samples of the measured steps of all ranks, divided by the time of these steps with the wait for their data: the \
         times of each rank are added up, and the largest of these sums counts, because ranks need not wait for each other. \
         Neither evaluations nor saves are in it.").console().first().swept(Higher),
    run("tokens_per_s", ("tokens/s", "", 0), SlowestRank, |f, ranks| json!(f.steps.tokens_per_s(ranks)),
        "Tokens of the measured steps of all ranks, padding left out, divided by the same time as in `samples_per_s`; null if the model has no tokens.").console().second().swept(Higher),
    run("model_gflop_per_sample", ("model FLOP/sample", "GFLOP", 4), Same,
        |f, _| json!(f.outcome.flops_per_sample.map(|flops| flops as f64 / 1e9)),
        "Floating-point operations of the model's products (linear layers, heads, convolutions, attention) for a sample in a step. \
         The backward pass has two products for each of the forward pass: the gradient of the weight, which frozen layers do \
         not have, and the gradient of the input, which the first layer does not have. They are counted in a pass \
         without arithmetic, over a sample of the mean length where lengths differ. Attention counts the pairs of positions that the causal \
         mask leaves, which is about half of what appendix B of the PaLM paper counts; what `--checkpoint-activations` computes again is \
         left out. Null for a model with layers that cannot be rehearsed."),
    run("model_gflop_per_s", ("model FLOP/s", "GFLOP/s", 1), SlowestRank,
        |f, ranks| json!(f.model_flops_per_s(ranks).map(|flops| flops / 1e9)),
        "`model_gflop_per_sample` times `samples_per_s`, divided by the number of ranks.").console(),
    run("peak_gflop_per_s", ("peak", "GFLOP/s", 1), Mean, |f, ranks| json!(f.peak_flops_per_s(ranks).map(|flops| flops / 1e9)),
        "The most floating-point operations that the threads of a rank make: a loop of fused multiply-adds of f32 in registers, \
         the best of 20 repetitions of a tenth of a millisecond, before the first step. With `--precision bf16` it is that loop or one of \
         dot products of bf16, whichever is faster.").console(),
    run("mfu_pct", ("model FLOP/s utilization", "%", 1), SlowestRank,
        |f, ranks| json!(f.model_flops_per_s(ranks).zip(f.peak_flops_per_s(Mean)).map(|(flops, peak)| 100.0 * flops / peak)),
        "`model_gflop_per_s` in percent of `peak_gflop_per_s`.").console().second().swept(Higher),
    run("limit_pct", ("share of the limit", "%", 1), Mean,
        |f, _| json!(f.operations().and_then(|of| of.whole()?.share()).map(|share| 100.0 * share)),
        "How near the operations of the recorded steps (`--profile`) come to their limit: the sum of their limits in percent of the sum of their \
         times. The limit of an operation is the larger of its arithmetic over the peak and its bytes over the speed of memory. \
         Arithmetic is that of the direct form: additions, multiplications, comparisons, divisions and roots are one each, and exponential functions 20; \
         biases, activations and pools that are fused with a product are left out. Bytes are those of all operands, twice for one that is changed in place; of \
         the tables of embeddings, the rows that are used. The peak is that of `peak_gflop_per_s`, and memory copies two arrays of 64 MiB \
         on all threads, the best of 5 times: both on all ranks at once, before the first recorded step and after the last. Above 100 where caches hold the operands, or where \
         a form multiplies less. Null without `--profile`, on cards, and where memory has no room for the arrays.").console(),
    run("operations", plain("operations"), Sum, |f, _| json!(f.operations()),
        "The operations of the recorded steps, those that take most time first: sums over all ranks and the recorded `steps`, whose times are `steps_ns`. \
         `speeds` are those of rank 0. `limit_ns` as in `limit_pct`.").console(),
    run("samples_per_s_without_data", ("samples/s without data", "", 0), SlowestOfStep,
        |f, ranks| json!(f.steps.step_ms(ranks, 0.5).map(|ms| f.config.samples_per_step() / ms * 1e3)),
        "Samples of a full step of all ranks, divided by `step_ms_median`: what the ranks would reach if loading \
         took no time.").second().elsewhere("/samples_per_s", 1.0),
    run("step_ms_median", ("median step", "ms", 2), SlowestOfStep, |f, ranks| json!(f.steps.step_ms(ranks, 0.5)),
        "Median time of a step, from the batch being there to the end of the optimizer.").console().first().swept(Lower),
    run("step_ms_p99", ("step, p99", "ms", 2), SlowestOfStep, |f, ranks| json!(f.steps.step_ms(ranks, 0.99)),
        "99th percentile of the same.").console().second(),
    run("cpu_wait_pct", ("without a core", "%", 1), Max, |f, ranks| json!(ranks.combine(f.reports.iter().filter_map(|r| r.cpu_wait_pct))),
        "The part of the measured steps in which a rank's main thread was ready to run and had no core, because other programs \
         use them (`%wait` of `pidstat`) or the host of this virtual machine took them (`%steal`): the most of any rank. Null where the kernel does not say, and with more ranks times threads than cores.").console(),
    run("step_apart_pct", ("two runs apart", "%", 1), Same,
        |f, _| json!(f.anatomy.means.apart_ms.map(|ms| 100.0 * ms / f.anatomy.means.wall_ms)),
        "By how much the mean steps of two such runs differ in 8 of 10 cases, as far as this run can tell: from the means of eight parts of it, by \
         Student's t; null with fewer than eight steps.").console(),
    time("step_ms", "mean step", |t| t.step,
        "Time from the batch being there to the end of the optimizer.").metrics().console().curve("speed/step_ms"),
    Figure::new("step_samples_per_s", ("samples/s", "", 0), First,
        Source::Step(|s| Some(json!(s.loss.samples as f64 / (s.times.step + s.times.data) as f64 * 1e9))),
        "Samples of the step, divided by its time with the wait for its data.").curve("speed/samples_per_s"),
    Figure::new("save_s", ("save", "s", 2), First, Source::Save(|s| s.took.as_secs_f64()),
        "Time for which training waits for a checkpoint: the copy of what is saved, and the end of the save before.").metrics().curve("checkpoint/save_s"),
    Figure::new("members", plain("ranks"), First, Source::Regrouped(|r| json!(r.ranks)),
        "The ranks that go on after some were lost or have joined.").metrics().curve("members/ranks"),
    Figure::new("lost", plain("lost"), First, Source::Regrouped(|r| json!(r.lost)),
        "The members that are there no more.").metrics(),
    Figure::new("joined", plain("joined"), First, Source::Regrouped(|r| json!(r.joined)),
        "The members that are new.").metrics(),
    Figure::new("regroup_s", ("regroup", "s", 3), First, Source::Regrouped(|r| json!(r.took.as_secs_f64())),
        "From the end of the last complete step until training goes on with other ranks.").metrics().curve("members/regroup_s"),
    run("regroups", plain("regroups"), First, |f, _| json!(f.outcome.regroups.iter().map(|of| of.0).sum::<u64>()),
        "How often ranks were lost or have joined, as rank 0 saw it. Without `--elastic`, 0."),
    run("regroup_total_s", ("regrouping", "s", 2), First,
        |f, _| json!({ "lost": f.outcome.regroups[0].1.as_secs_f64(), "joined": f.outcome.regroups[1].1.as_secs_f64() }),
        "The sum of `regroup_s`, by cause: ranks were lost, or have only joined."),

    // Where the time of a step goes: the main thread, or the device if it computes.
    time("to_device_ms", "to device", |t| t.to_device, "Time in which the step waits for the copy of its batch to the device, or the \
         host for that of the next one.").metrics().part_of_step().curve("anatomy/to_device_ms").second(),
    time("forward_ms", "forward", |t| t.forward, "Forward pass and loss, less exposed communication within.")
        .metrics().part_of_step().curve("anatomy/forward_ms").second().elsewhere("/anatomy/forward_ms", 1.0),
    time("backward_ms", "backward", |t| t.backward, "Backward pass, less synchronization within.")
        .metrics().part_of_step().curve("anatomy/backward_ms").second().elsewhere("/anatomy/backward_ms", 1.0),
    time("sync_ms", "sync", |t| t.sync, "Arithmetic and copies that synchronization adds: dividing, packing, compressing.")
        .metrics().part_of_step().curve("anatomy/sync_ms").second(),
    time("comm_exposed_ms", "exposed comm.", |t| t.exposed, "Time in which the main thread is blocked on communication, whatever the reason.")
        .metrics().part_of_step().curve("anatomy/exposed_ms").first().swept(Lower),
    time("optimizer_ms", "optimizer", |t| t.optimizer, "Clipping and the update of the parameters.")
        .metrics().part_of_step().curve("anatomy/optimizer_ms").second().elsewhere("/anatomy/optimizer_ms", 1.0),
    time("data_ms", "data", |t| t.data, "The wait for the batch, before the step. Where data are generated, the time to make \
         them.").metrics().part_of_step().curve("speed/data_ms").second().elsewhere("/anatomy/data_ms", 1.0),
    time("rest_ms", "rest", StepTimes::rest, "The step without its other parts.").part_of_step().second(),
    time("wall_ms", "step + data", |t| t.step + t.data, "The step with the wait for its batch: the sum of the parts above.")
        .console().second().elsewhere("/anatomy/wall_ms", 1.0),
    time("compute_ms", "compute", StepTimes::compute, "Forward, backward, sync and optimizer together.").console().swept(Lower),

    time("copy_ms", "copies of the batch", |t| t.copying, "Time in which the batch is copied to the device, in this step or before.")
        .metrics().console().curve("speed/copy_ms"),
    time("copy_hidden_ms", "hidden copies", |t| t.copying.saturating_sub(t.to_device),
        "`copy_ms` less `to_device_ms`: the part of the copies that no step waits for.").console().swept(Higher),
    time("launch_ms", "launching", |t| t.launching, "Time of the host to put work into the stream of the device's kernels; none on \
         the processor.").metrics().console().curve("speed/launch_ms"),

    // Communication during the step.
    time("comm_ms", "communication", |t| t.communicating,
        "Time of the step in which at least one operation runs: from when it starts until it is done. Operations that sum up the loss are left out: they wait while everybody computes.")
        .console().elsewhere("/anatomy/communication_ms", 1.0),
    time("comm_hidden_ms", "hidden comm.", |t| t.hidden, "The part of `comm_ms` in which the main thread computes: in a pass, in sync or in the optimizer, and not blocked on communication.")
        .metrics().console().curve("communication/hidden_ms").swept(Higher),
    run("overlap_pct", ("hidden", "%", 1), Mean,
        |f, ranks| json!(f.steps.pct(ranks, |t| t.hidden, |t| t.communicating)),
        "`comm_hidden_ms` in percent of `comm_ms`.").console().second().swept(Higher),
    run("comm_overhead_pct", ("exposed comm. of step", "%", 2), Mean,
        |f, ranks| json!(f.steps.pct(ranks, |t| t.exposed, |t| t.step)),
        "`comm_exposed_ms` in percent of `step_ms`. Earlier versions called this communication overhead.").console().second(),
    run("bubble_pct", ("bubble", "%", 2), Mean,
        |f, _| json!(f.pipeline.as_ref().map(|of| of.mean()).map(|of| 100.0 * (1.0 - of.busy / of.step))),
        "The part of a step of a pipeline in which ranks are idle, over the steps of which each action is kept; the mean over \
         ranks. The following figures are its parts, by cause.").console(),
    idle("bubble_fill_ms", "fill", |f, _| json!(f.idle(IdleCause::Fill)),
        "Ranks wait for an input, and would with equal stages and messages that take no time."),
    idle("bubble_drain_ms", "drain", |f, _| json!(f.idle(IdleCause::Drain)),
        "Ranks wait for a gradient, and would with equal stages and messages that take no time."),
    idle("bubble_imbalance_ms", "imbalance", |f, _| json!(f.idle(IdleCause::Imbalance)),
        "Stages usually take longer than others: the idle time of a rehearsal with the median duration of each, beyond that \
         with equal ones. Below zero if ranks are idle for less time."),
    idle("bubble_late_peer_ms", "late peer", |f, _| json!(f.idle(IdleCause::LatePeer)),
        "Actions took longer than they usually do, or a rank began the step late: what a rehearsal with the step's own durations \
         adds."),
    idle("bubble_transfer_ms", "transfer", |f, _| json!(f.idle(IdleCause::Transfer)),
        "Messages travel: what a rehearsal with the times of the messages adds."),
    idle("bubble_head_of_line_ms", "head of line", |f, _| json!(f.idle(IdleCause::HeadOfLine)),
        "Messages wait for those before them in their queue: what a rehearsal with queues adds."),
    idle("bubble_barrier_ms", "barrier", |f, _| json!(f.idle(IdleCause::Barrier)),
        "Ranks wait at the end of the step until all have the sums of the loss, or the norm of all gradients, of which each \
         computes its own part in this time."),
    idle("bubble_rest_ms", "unexplained", |f, _| json!(f.pipeline.as_ref().map(|of| of.mean().rest)),
        "Idle time that no rehearsal explains: how far the parts can be believed."),
    run("bubble_rest_most_pct", ("unexplained, at most", "%", 2), Max,
        |f, _| json!(f.pipeline.as_ref().map(|of| of.most_rest_pct)),
        "The same, above or below zero, in percent of the step: the most of any rank in any of these steps."),
    time("comm_wait_ms", "waiting", |t| t.wait,
        "Time in which operations, all of them, wait for the last rank to arrive: the sum over operations, exposed or hidden.")
        .metrics().console().curve("communication/wait_ms").second().swept(Lower),
    time("comm_exposed_wait_ms", "exposed waiting", |t| t.exposed_wait,
        "The part of `comm_exposed_ms` in which an operation waits for the last rank to arrive.")
        .console().elsewhere("/anatomy/exposed_wait_ms", 1.0),
    time("comm_move_ms", "moving", |t| t.moving, "Time in which operations move and reduce data, after the last rank has arrived: the sum over operations.")
        .metrics().console().curve("communication/move_ms"),
    time("link_late_ms", "later than the link", |t| t.late, "Time by which operations end later than on the emulated link, because this \
         machine is slower: the sum over operations.").console(),
    step("comm_ops", ("operations", "", 0), First, Source::Times(|t| t.ops, 1.0), "Operations of the step.")
        .curve("communication/operations"),
    step("comm_mb", ("messages", "MB", 2), First, Source::Times(|t| t.bytes, 1e-6), "Bytes of the messages of the step's operations, in MB of 1e6 bytes.")
        .curve("communication/mb"),
    Figure::new("comm_ops_per_step", ("operations", "", 2), Mean, Source::Times(|t| t.ops, 1.0),
        "Operations of a step: mean.").summary().swept(Lower),
    Figure::new("comm_mb_per_step", ("messages", "MB", 2), Mean, Source::Times(|t| t.bytes, 1e-6),
        "Bytes of the messages of a step's operations in groups of two ranks or more, in MB of 1e6 bytes: mean.").summary().swept(Lower),
    run("gather_exposed_ms", ("waiting for gathers", "ms", 2), Mean,
        |f, _| json!(f.gathers.as_ref().map(|_| f.anatomy.gathers.iter().map(|of| of.exposed_ms).sum::<f64>())),
        "Time in which the passes of a step wait for units that are gathered: the sum over gathers.").console(),
    run("gather_ms", ("gathers", "ms", 2), Mean, |f, _| json!(f.gathers.as_ref().map(|(uses, _)| uses.gathering())),
        "Time in which gathers of a step move data: the sum over gathers.").console(),
    run("gather_replayed_ms", ("waiting for gathers, replayed", "ms", 2), Mean,
        |f, _| json!(f.gathers.as_ref().map(|(uses, ahead)| uses.exposed(*ahead))),
        "The same wait as `gather_exposed_ms`, computed from the times of gathers, reductions and passes.").console(),
    run("unlike_steps", plain("unlike steps"), Max, |f, ranks| json!(f.combine(ranks, |r| r.alike.num_unlike)),
        "Measured steps whose operations or gradients differ from the first one's. The times of single operations and \
         gradients leave them out; all other figures have them.").console(),

    // Memory.
    run("peak_bytes", plain("peak memory"), Max, |f, ranks| json!(f.peak_bytes(ranks)),
        "The most bytes in tensors at once, by category and in `total`.").console(),
    run("memory", plain("memory by phase"), Each, |f, _| json!(f.memory()),
        "Bytes of each rank after initialization, after the forward pass, after the backward pass and after the step, and \
         the most at once within each of these phases of the measured steps: by category, in `total`, and in `reserved` \
         (taken from the system: in use, or free in a pool). `peak_bytes` beside the phases is that of the whole run.").console(),
    run("memory_predicted", plain("predicted memory"), Each, |f, _| json!(f.memory_predicted()),
        "Bytes that each rank needs in a step, by category and in `total`, as predicted by formula before the run. `resident` is the prediction for \
         `resident_bytes`, if each rank is a process.").console(),
    compared("peak_mb", ("peak", "MB", 2), Max, "The most memory of a rank in tensors, in MB of 1e6 bytes.").first().swept(Lower)
        .elsewhere("/peak_bytes/total", 1e-6),
    run("resident_bytes", plain("resident"), Mean,
        |f, ranks| json!(f.combine(ranks, |r| r.resident_bytes)),
        "Proportional set size: a process's own pages, and its share of those that several have.").console(),
    run("card_busy_pct", ("card busy", "%", 1), Mean, |f, ranks| json!(ranks.combine(f.cards().filter_map(CardUse::busy_pct))),
        "For how much of the time a card ran a kernel of any process: the mean of what the driver (NVML) says of its last second or less, \
         asked between measured steps, at most every 100 ms. Null on other devices, and where the driver does not say.").console(),
    run("card_used_bytes", plain("card's memory"), Max,
        |f, ranks| json!(ranks.combine(f.cards().filter_map(|of| of.most_bytes).map(|of| of as f64)).map(|of| of as u64)),
        "The most bytes of a card's memory that all processes and the driver used at one of these times. Null as `card_busy_pct`.").console(),

    // Results.
    run("weights_sha256", plain("weights"), First, |f, _| json!(f.reports.first().map(|r| &r.weights_sha256)),
        "Digest of the parameters.").console(),
    run("replicas_agree", plain("replicas agree"), Same, |f, _| json!(f.replicas_agree()),
        "Whether all ranks hold the same parameters.").console(),
    run("dropped_spans", plain("dropped"), Sum, |f, ranks| json!(f.combine(ranks, |r| r.dropped_spans)),
        "Spans, marks and operations that found no room: if there are any, times and counts are too low.").console(),
    run("sync_cost", plain("cost of synchronization"), Mean, |f, _| json!(f.sync_cost),
        "Time of a step with synchronization minus that of one without, where `--sync-blocks` alternates them.").console(),
    run("anatomy", plain("anatomy"), Mean, |f, _| json!(f.anatomy),
        "The operations and gradients of a step one by one, the buckets, and the slowest rank.").console(),
    run("advice", plain("advice"), Same, |f, _| json!(f.told.as_ref().map(|told| &told.text)), "The advice that follows from the anatomy.").console(),
    run("advised", plain("advised"), Same, |f, _| json!(f.told.as_ref().map(|told| &told.account)),
        "The numbers of the advice, in ms. `exposed_ms` is the sum of `waiting_ms`, `removed_ms` (by the change that `remedy` names) and \
         `remains_ms`. `gain` is what the step would gain: the median of the steps, and what a tenth of them is below and above. `apart_ms` is by how much the mean steps of two such runs differ."),
    run("traces", plain("traces"), Each, |f, _| json!(f.traces()), "The trace of each rank, if the run was profiled."),
    run("missing_files", plain("not written"), Each, |f, _| json!(f.missing_files()),
        "Traces and curves of TensorBoard that could not be written, with the reason. The run went on without them.").console(),

    // Figures that a comparison adds to the summaries.
    compared("cost", ("cost", "", 5), First, "The price of an hour times `total_s` in hours.").first(),
    compared("traced_idle_pct", ("idle, traced", "%", 2), Mean, IDLE).second(),
    compared("traced_compute_pct", ("compute, traced", "%", 2), Mean, COMPUTE).second(),
    compared("traced_overlap_pct", ("hidden, traced", "%", 2), Mean, HIDDEN).second(),
    compared("traced_overhead_pct", ("comm. of kernel time, traced", "%", 2), Mean, OF_KERNELS).second(),
];

// Figures of the steps that were profiled, as the analysis of traces defines them; means over ranks.
const IDLE: &str = "From the traces: time without any kernel in percent of the time from the first to the last kernel.";
const COMPUTE: &str = "From the traces: time with at least one compute kernel in percent of the time from the first to the last kernel.";
const HIDDEN: &str = "From the traces: the part of the communication during which a compute kernel ran, in percent. `overlap_pct` has what \
    the run measured itself: all measured steps, and computation of the main thread.";
const OF_KERNELS: &str = "From the traces: the sum of the times of communication kernels, exposed or hidden, in percent of that of all kernels.";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::figures::figure::Compared;
    use crate::figures::page_tests::views;

    #[test]
    fn names_and_curves_are_unique_and_every_figure_is_shown() {
        let names: BTreeSet<&str> = TABLE.iter().map(|figure| figure.name).collect();
        assert_eq!(names.len(), TABLE.len());
        let curves: Vec<&str> = TABLE.iter().filter_map(|figure| figure.curve).collect();
        assert_eq!(curves.iter().collect::<BTreeSet<_>>().len(), curves.len());
        for figure in TABLE {
            assert!(!views(figure).is_empty(), "{} is shown nowhere", figure.name);
            assert!(figure.definition.ends_with('.'), "{}", figure.name);
            assert!(!figure.name.ends_with("_pctg"), "{}", figure.name);
            assert_eq!(figure.unit == "%", figure.name.ends_with("_pct"), "{}", figure.name);
            assert_eq!(figure.unit == "ms", figure.name.contains("_ms"), "{}", figure.name);
            let is_read = figure.in_summary || figure.elsewhere.is_some();
            let is_own = matches!(figure.source, Source::Comparison);
            assert!(figure.compared == Compared::No || is_read || is_own, "{}", figure.name);
        }
    }

    #[test]
    fn the_parts_add_up_to_the_step() {
        let times =
            StepTimes { step: 100, data: 7, forward: 30, backward: 40, ..StepTimes::default() };
        let times = StepTimes { sync: 3, optimizer: 5, exposed: 11, ..times };
        let value = |figure: &Figure| match figure.source {
            Source::Times(of, _) => of(&times),
            _ => panic!("{} is no time", figure.name),
        };
        let parts = TABLE.iter().filter(|figure| figure.is_part_of_step);
        assert_eq!(parts.map(value).sum::<u64>(), value(find("wall_ms").unwrap()));
    }

    #[test]
    fn summaries_of_earlier_versions_are_read() {
        let earlier = json!({
            "loss": 0.5, "samples_per_s": 100.0, "peak_bytes": { "total": 3_000_000 },
            "sync_ms": 1.5, "anatomy": { "data_ms": 2.5, "communication_ms": 4.0 },
        });
        let now = json!({ "train_loss": 0.25, "data_ms": 1.0, "eval_accuracy": 0.5 });
        let values = |summary: &Value| {
            ["train_loss", "data_ms", "comm_ms", "sync_ms", "peak_mb", "eval_accuracy_pct"]
                .map(|name| read(name, summary))
        };
        assert_eq!(values(&earlier), [Some(0.5), Some(2.5), Some(4.0), Some(1.5), Some(3.0), None]);
        assert_eq!(values(&now), [Some(0.25), Some(1.0), None, None, None, Some(50.0)]);
        assert_eq!(read("no_such_figure", &now), None);
    }
}
