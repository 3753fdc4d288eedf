//! What is drawn is what runs: each rank carries out its list, action by action.

use std::sync::{Arc, Mutex};

use paceline_collectives::Mesh;
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Device, Tensor};
use paceline_model::{Batch, Block, Context, Half, Layer, Saved};
use paceline_schedule::{
    Action, Costs, Entry, Gpipe, Kind, OneFOneB, Placement, Plan, SCHEDULES, Schedule, Shape,
};
use paceline_strategies::{
    ActionTimes, MicroBatch, Replica, ReplicaOptions, Single, Stages, StepContext, StepState,
    train_step,
};
use paceline_trace::SpanTrack;

use crate::common::{Net, Trainer, on_ranks};

/// Stages that are all alike.
fn even(stages: &Placement) -> Costs {
    Costs::even(stages, 1.0, 1.0, 1.0)
}

/// The actions of each rank in a step, as it recorded them.
fn executed(ranks: usize, stages: &Stages) -> Vec<Vec<ActionTimes>> {
    on_ranks(ranks, |group| {
        let mesh = Mesh::new(group, &format!("pp={ranks}").parse().unwrap()).unwrap();
        let mut trainer = Trainer::in_stages(Net::DeepMlp, mesh, Box::new(Single), stages).unwrap();
        let shares = trainer.shares(&vec![2; stages.micro_batches]);
        let (strategy, mut cx, _) = trainer.parts();
        train_step(strategy, &mut cx, &shares).unwrap();
        cx.state.actions().to_vec()
    })
}

#[test]
fn what_is_executed_is_the_plan() {
    for of in SCHEDULES {
        for (ranks, micro_batches) in
            [2, 3, 4].into_iter().flat_map(|p| [1, 2, 3, 4, 8, 12].map(|m| (p, m)))
        {
            let plan = match Plan::new(of, ranks, micro_batches, even) {
                Ok(plan) => plan,
                Err(error) => {
                    let least = (1..).find(|m| Plan::new(of, ranks, *m, even).is_ok()).unwrap();
                    let says = error.to_string();
                    assert!(says.ends_with(&format!("pass {least}")), "{}: {says}", of.name());
                    continue;
                }
            };
            let text = |rank: usize| {
                let actions = plan.actions(rank).iter().map(ToString::to_string);
                actions.collect::<Vec<_>>().join(",")
            };
            let all = executed(ranks, &Stages::even(of, micro_batches));
            for (rank, acted) in all.iter().enumerate() {
                // Those that have begun and not ended, in stages of this rank.
                let (mut now, mut most) = (0i64, 0i64);
                for one in acted {
                    now += match one.action.kind {
                        Kind::Forward => 1,
                        Kind::Backward | Kind::BackwardWeight => -1,
                        _ => 0,
                    };
                    most = most.max(now);
                }
                assert!(acted.windows(2).all(|two| two[0].span.end_ns <= two[1].span.end_ns));
                let executed: Vec<String> =
                    acted.iter().map(|one| one.action.to_string()).collect();
                let what = format!("{}, {ranks} ranks, {micro_batches} micro-batches", of.name());
                assert_eq!(executed.join(","), text(rank), "{what}, rank {rank}");
                let chunks = plan.shape().placement.chunks() as f64;
                assert_eq!(most as f64 / chunks, plan.in_flight(rank), "{what}, rank {rank}");
            }
        }
    }
}

/// GPipe if the first stage takes longer than the last one, and otherwise 1F1B.
struct ByCosts;

impl Schedule for ByCosts {
    fn name(&self) -> &'static str {
        "by_costs"
    }

    fn about(&self) -> &'static str {
        "lists that follow from costs"
    }

    fn list(&self, shape: &Shape, rank: usize, costs: &Costs) -> Vec<Entry> {
        if costs.forward.first() > costs.forward.last() {
            Gpipe.list(shape, rank, costs)
        } else {
            OneFOneB.list(shape, rank, costs)
        }
    }
}

#[test]
fn lists_follow_from_the_costs_of_the_stages() {
    let uneven = Costs { forward: vec![2.0, 1.0], ..even(&Placement::line(2)) };
    let csv = [None, Some(uneven)].map(|costs| {
        let of = |stages: &_| costs.clone().unwrap_or_else(|| even(stages));
        let plan = Plan::new(&ByCosts, 2, 4, of).unwrap();
        let stages = Stages { costs: costs.clone(), ..Stages::even(ByCosts, 4) };
        for (rank, acted) in executed(2, &stages).iter().enumerate() {
            let actions: Vec<Action> = acted.iter().map(|one| one.action).collect();
            assert_eq!(actions, plan.actions(rank), "{costs:?}, rank {rank}");
        }
        plan.csv()
    });
    assert_ne!(csv[0], csv[1]);
}

/// The calls of the last blocks of a rank's stages, in order.
type Calls = Arc<Mutex<Vec<Action>>>;

/// A block that notes its calls, if it is the last one of a stage. The first number of its input is that of the micro-batch, and it
/// passes this number on.
struct Witness {
    inner: Block,
    stage: Option<usize>,
    calls: Calls,
}

impl Witness {
    fn note(&self, kind: Kind, micro_batch: &Tensor) {
        let micro_batch = micro_batch.read::<f32>().unwrap()[0] as usize;
        let call = self.stage.map(|stage| Action::new(stage, kind, micro_batch));
        self.calls.lock().unwrap().extend(call);
    }
}

impl Layer for Witness {
    fn forward(&self, cx: &mut Context, input: Tensor) -> paceline_model::Result<(Tensor, Saved)> {
        if input.device() == Device::Meta {
            // Only the shapes are wanted.
            return self.inner.forward(cx, input);
        }
        self.note(Kind::Forward, &input);
        let (output, inner) = self.inner.forward(cx, input.clone())?;
        output.write::<f32>()?[0] = input.read::<f32>()?[0];
        let mut saved = Saved::of([input]);
        saved.parts.push(inner);
        Ok((output, saved))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> paceline_model::Result<Option<Tensor>> {
        let kind = match half {
            Half::Whole { .. } => Kind::Backward,
            Half::Input { .. } => Kind::BackwardInput,
            Half::Weight => Kind::BackwardWeight,
        };
        self.note(kind, &saved.tensors::<1>()?[0]);
        self.inner.backward(cx, &mut saved.parts[0], d_output, half)
    }
}

/// The executor notes what it carries out while it reads its list. Layers do not know the list.
#[test]
fn layers_are_called_as_planned() {
    const MICRO_BATCHES: usize = 4;
    for of in SCHEDULES {
        let plan = Plan::new(of, 2, MICRO_BATCHES, even).unwrap();
        let stages = Stages::even(of, MICRO_BATCHES);
        let called = on_ranks(2, |group| {
            let calls = Calls::default();
            let mut model = Net::DeepMlp.build(2);
            let per_stage = model.blocks.len() / plan.shape().placement.stages();
            let witness = |(at, inner): (usize, Block)| {
                let stage = (at % per_stage + 1 == per_stage).then_some(at / per_stage);
                Block::new(inner.unit, Witness { inner, stage, calls: calls.clone() })
            };
            model.blocks = model.blocks.into_iter().enumerate().map(witness).collect();
            let mesh = Mesh::new(group, &"pp=2".parse().unwrap()).unwrap();
            let (compute, memory) = (Compute::new(1, Allocator::new()).unwrap(), Allocator::new());
            let setting = (1, ReplicaOptions::DEFAULT);
            let made = Replica::in_stages(&mut Single, model, compute, mesh, &stages, setting);
            let replica = made.unwrap();
            let share = |micro_batch: usize| {
                let (inputs, targets) = Net::DeepMlp.batch(&memory, 0..2);
                inputs.write::<f32>().unwrap()[0] = micro_batch as f32;
                MicroBatch { batch: Batch::new(inputs, targets), global_count: 2 }
            };
            let shares: Vec<MicroBatch> = (0..MICRO_BATCHES).map(share).collect();
            let (mut state, mut track) =
                (StepState::new(&replica).unwrap(), SpanTrack::with_capacity(100));
            let mut cx = StepContext { replica: &replica, state: &mut state, track: &mut track };
            train_step(&mut Single, &mut cx, &shares).unwrap();
            std::mem::take(&mut *calls.lock().unwrap())
        });
        for (rank, called) in called.into_iter().enumerate() {
            let planned = plan.list(rank).iter().flat_map(|entry| entry.actions());
            assert_eq!(called, planned.collect::<Vec<_>>(), "{}, rank {rank}", of.name());
        }
    }
}
