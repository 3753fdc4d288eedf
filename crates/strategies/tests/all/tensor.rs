//! Layers that several ranks divide end with the weights that one process has.

use paceline_memory::{Accelerator, Allocator, SimSpec};
use paceline_model::{Divided, LlamaConfig, LlamaTask, MlpConfig, Model, SpecialTokens};
use paceline_strategies::schedule::named;
use paceline_strategies::{Replica, ReplicaOptions, Single, Stages};

use crate::common::{EXACT, Make, Net, Optim, SHARDED, Trainer, largest_difference, on_mesh};

/// Sizes of the micro-batches of a step. Their rows cannot be divided evenly.
const SIZES: [usize; 4] = [4, 3, 5, 2];

/// Can be divided into 1, 2, 3, 4, 6 and 12 parts.
fn llama(ties: bool) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 24,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 24,
        num_key_value_heads: 12,
        head_dim: 4,
        max_position_embeddings: crate::common::SEQ,
        rope_theta: 10_000.0,
        rope_scaling: None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.2,
        tie_word_embeddings: ties,
        task: LlamaTask::LanguageModel,
        special_tokens: SpecialTokens::default(),
    }
}

fn build(net: Net, world_size: usize, divided: Divided) -> Model {
    let parts = divided.parts;
    match net {
        Net::Mlp | Net::DeepMlp => {
            let num_layers = if matches!(net, Net::Mlp) { 2 } else { 7 };
            let (input_dim, hidden_dim, output_dim) = (12, 24, 3);
            let of = MlpConfig { input_dim, hidden_dim, output_dim, num_layers, tie_layers: false };
            if parts == 1 { of.build(world_size) } else { of.build_divided(world_size, divided) }
        }
        net => {
            let ties = matches!(net.in_f32(), Net::TiedLlama);
            llama(ties).build_divided(world_size, divided)
        }
    }
    .unwrap()
}

/// Divided into parts, with rows divided between layers.
fn in_parts(parts: usize) -> Divided {
    Divided { parts, by_rows: true, ..Divided::NOT }
}

/// The digest, the losses and the norms of four steps.
type Trained = (String, Vec<f64>);

fn train(trainer: &mut Trainer) -> Trained {
    let mut losses = Vec::new();
    for _ in 0..4 {
        losses.push(trainer.clipped_step(&SIZES, 0.05).loss);
    }
    (trainer.digest(), losses)
}

fn on_divided(net: Net, mesh: &str, divided: Divided, make: Make) -> Trained {
    let all = on_mesh(mesh, |mesh| {
        let model = build(net, mesh.world().world_size(), divided);
        train(&mut Trainer::with_model(model, net, mesh, make(), Optim::Momentum))
    });
    assert!(all.iter().all(|of| *of == all[0]), "{net:?}, {mesh}: {all:?}");
    all.into_iter().next().unwrap()
}

const SINGLE: Make = || Box::new(Single);

const NETS: [Net; 5] = [Net::Mlp, Net::DeepMlp, Net::Llama, Net::TiedLlama, Net::TiedLlamaBf16];

#[test]
fn any_number_of_ranks_has_the_bits_of_one() {
    for net in NETS {
        for (parts, ranks) in [(4, &[2, 4][..]), (3, &[3]), (6, &[3, 6])] {
            let expected = on_divided(net, "tp=1", in_parts(parts), SINGLE);
            for ranks in ranks {
                for (by_rows, overlaps) in
                    [(true, false), (false, false), (true, true), (false, true)]
                {
                    let divided = Divided { by_rows, overlaps, ..in_parts(parts) };
                    let found = on_divided(net, &format!("tp={ranks}"), divided, SINGLE);
                    assert_eq!(found, expected, "{net:?} on {ranks}, {divided:?}");
                }
            }
        }
    }
}

#[test]
fn parts_are_near_the_whole() {
    for net in [Net::Mlp, Net::DeepMlp, Net::Llama, Net::TiedLlama] {
        let whole = on_divided(net, "dp=1", Divided::NOT, SINGLE);
        let parts = on_divided(net, "tp=1", in_parts(4), SINGLE);
        let off = largest_difference(&whole.1, &parts.1);
        assert!(off < 1e-6, "{net:?}: losses are off by {off}: {whole:?} {parts:?}");
    }
}

#[test]
fn strategies_go_on_dividing() {
    for net in [Net::DeepMlp, Net::Llama] {
        let expected = on_divided(net, "dp=2", in_parts(2), EXACT[0]);
        for make in EXACT.into_iter().chain(SHARDED) {
            for mesh in ["dp=2,tp=2", "tp=2,dp=2"] {
                let found = on_divided(net, mesh, in_parts(2), make);
                assert_eq!(found, expected, "{net:?}, {mesh}, {}", make().name());
            }
        }
    }
}

/// Some of the schedules compute the gradients of inputs before those of the weights, in passes of their own.
#[test]
fn stages_go_on_dividing() {
    for net in [Net::DeepMlp, Net::Llama] {
        let alone = on_divided(net, "tp=1", in_parts(2), SINGLE);
        for name in ["1f1b", "zb_h1", "zbv", "dualpipev"] {
            for (mesh, by_rows, overlaps) in
                [("pp=2,tp=2", true, false), ("tp=2,pp=2", true, true), ("pp=2,tp=2", false, true)]
            {
                let divided = Divided { by_rows, overlaps, ..in_parts(2) };
                let all = on_mesh(mesh, |mesh| {
                    let model = build(net, mesh.world().world_size(), divided);
                    let stages = Stages::even(named(name).unwrap(), SIZES.len());
                    train(&mut Trainer::model_in_stages(model, net, mesh, SINGLE(), &stages))
                });
                let what = format!("{net:?}, {name}, {mesh}, {divided:?}");
                assert!(all.iter().all(|of| *of == alone), "{what}: {all:?} {alone:?}");
            }
        }
    }
}

#[test]
fn late_work_on_an_accelerator_changes_nothing() {
    for net in [Net::Mlp, Net::TiedLlama] {
        let expected = on_divided(net, "tp=2", in_parts(2), SINGLE);
        for seed in 0..20 {
            let all = on_mesh("tp=2", |mesh| {
                let memory = Allocator::on(
                    &Accelerator::sim(SimSpec::late(seed)).stream("compute").unwrap(),
                );
                let model = build(net, 2, Divided { overlaps: seed % 2 == 0, ..in_parts(2) });
                let mut trainer =
                    Trainer::in_memory(&memory, model, net, mesh, SINGLE(), Optim::Momentum);
                train(&mut trainer)
            });
            assert!(all.iter().all(|of| *of == expected), "{net:?}, seed {seed}: {all:?}");
        }
    }
}

#[test]
fn a_rank_holds_its_part_alone() {
    let sizes = on_mesh("tp=4", |mesh| {
        let model = build(Net::Llama, 4, in_parts(4));
        let (options, mut strategy) = (ReplicaOptions::default(), SINGLE());
        let compute = paceline_kernels::Compute::new(1, Allocator::new()).unwrap();
        let replica = Replica::new(strategy.as_mut(), model, compute, mesh, 1, options).unwrap();
        let here = replica.model.layout.params().iter();
        here.map(|param| param.range().len()).sum::<usize>()
    });
    let whole = build(Net::Llama, 1, Divided::NOT).layout;
    let divided: usize = whole
        .params()
        .iter()
        .filter(|of| !of.name.contains("norm"))
        .map(|of| of.shape.num_elems())
        .sum();
    let norms = whole.num_params() - divided;
    assert_eq!(sizes, [norms + divided / 4; 4]);
}
