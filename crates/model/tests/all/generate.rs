//! Token by token, a Llama has the logits and chooses the tokens of `transformers`, which `fixtures/make_llama.py` stored.

use crate::common::{integers as numbers_of, stored, values, write};
use paceline_kernels::{Compute, SimdLevel, linear};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, Context, Generator, Layer, LlamaConfig, OpenUnits, ParamId, Sampling, Storage,
    TokenSampler,
};
use safetensors::SafeTensors;

/// Whole sequences with all their logits.
static SEQUENCES: &[u8] = include_bytes!("../fixtures/llama.safetensors");
/// Prompts with the tokens that follow.
static TEXTS: &[u8] = include_bytes!("../fixtures/generate.safetensors");

/// Every case of [`TEXTS`], so that none is forgotten.
const TEXT_CASES: [&str; 2] = ["grouped_tied", "whole"];

fn metadata(file: &[u8]) -> std::collections::HashMap<String, String> {
    SafeTensors::read_metadata(file).unwrap().1.metadata().clone().unwrap().into_iter().collect()
}

/// Rows of numbers.
fn integers(file: &[u8], name: &str) -> Vec<Vec<u32>> {
    let file = SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor(name).unwrap();
    let elems = tensor.data().chunks_exact(8);
    let elems: Vec<u32> =
        elems.map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32).collect();
    elems.chunks_exact(*tensor.shape().last().unwrap()).map(<[u32]>::to_vec).collect()
}

/// The settings and the weights of a case.
fn model(file: &[u8], case: &str, dtype: DType) -> (LlamaConfig, Storage) {
    let config = LlamaConfig::from_json(&metadata(file)[case]).unwrap();
    let layout = config.build(1).unwrap().layout;
    let storage = Storage::private(layout.clone(), dtype, &Allocator::new()).unwrap();
    for (at, param) in layout.params().iter().enumerate() {
        let weight = stored(file, &format!("{case}.weight.{}", param.name)).1;
        write(&storage.value(ParamId(at)).unwrap(), &weight);
    }
    (config, storage)
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

/// Every way to compute: f64, and f32 at each SIMD level.
fn computes() -> Vec<(Compute, DType)> {
    let compute = |threads| Compute::new(threads, Allocator::new()).unwrap();
    let levels = SimdLevel::available().into_iter();
    let levels = levels.map(|level| (compute(2).with_simd(level).unwrap(), DType::F32));
    levels.chain([(compute(1), DType::F64)]).collect()
}

#[test]
fn every_position_has_the_logits_of_transformers() {
    for case in ["causal", "grouped", "tied", "theta", "linear_scaling", "llama3_scaling"] {
        let want = stored(SEQUENCES, &format!("{case}.result.logits")).1;
        let largest = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        for (compute, dtype) in computes() {
            let (config, storage) = model(SEQUENCES, case, dtype);
            let mut want = want.chunks_exact(config.vocab_size);
            let rows = integers(SEQUENCES, &format!("{case}.batch.inputs"));
            for (row, tokens) in rows.iter().enumerate() {
                let len = tokens.len();
                let mut generator = Generator::new(&compute, &config, &storage, len).unwrap();
                for (position, token) in tokens.iter().enumerate() {
                    generator.read(*token).unwrap();
                    let got = values(&generator.logits().unwrap());
                    let want = want.next().unwrap();
                    let off = largest_difference(&got, want) / largest;
                    let what = format!("{case} {dtype} {:?} row {row}", compute.simd());
                    // Two layers of f32 sums; `transformers` computes norms and angles in f32, whatever the type of the
                    // model. A wrong term would cause an error of about one.
                    assert!(off <= 2e-5, "{what}, token {position}: {off}");
                }
            }
            assert!(want.next().is_none(), "{case}: a row was left out");
        }
    }
}

#[test]
fn in_bf16_the_logits_are_near_those_of_f32() {
    for case in ["grouped", "tied"] {
        for (compute, _) in computes() {
            let rows = integers(SEQUENCES, &format!("{case}.batch.inputs"));
            let logits_in = |dtype| {
                let (config, storage) = model(SEQUENCES, case, dtype);
                let mut generator =
                    Generator::new(&compute, &config, &storage, rows[0].len()).unwrap();
                let mut all = Vec::new();
                for token in &rows[0] {
                    generator.read(*token).unwrap();
                    all.extend(values(&generator.logits().unwrap()));
                }
                all
            };
            let (want, got) = (logits_in(DType::F32), logits_in(DType::BF16));
            let largest = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let off = largest_difference(&got, &want) / largest;
            // A rounding of bf16 is off by 2^-9 at most, and about twenty follow each other. The numbers
            // are rounded, so they must differ.
            assert!(0.0 < off && off <= 0.05, "{case} {:?}: {off}", compute.simd());
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    let mut cases: Vec<String> = metadata(TEXTS).into_keys().collect();
    cases.retain(|case| case != "transformers");
    cases.sort();
    assert_eq!(cases, TEXT_CASES);
    for case in TEXT_CASES {
        let [prompt, want] =
            ["prompt", "greedy"].map(|what| integers(TEXTS, &format!("{case}.{what}")).concat());
        assert_eq!(want.len(), 50);
        for (compute, dtype) in computes() {
            let (config, storage) = model(TEXTS, case, dtype);
            let max_len = prompt.len() + want.len();
            let mut generator = Generator::new(&compute, &config, &storage, max_len).unwrap();
            let mut sampler = TokenSampler::new(Sampling::Greedy).unwrap();
            generator.read_all(&prompt).unwrap();
            let mut got = Vec::new();
            for _ in 0..want.len() {
                let token = sampler.choose(&generator.logits().unwrap(), &[]).unwrap();
                generator.read(token).unwrap();
                got.push(token);
            }
            assert_eq!(got, want, "{case} {dtype} {:?}", compute.simd());
            assert_eq!(generator.position(), max_len);
            let error = generator.read(0).unwrap_err().to_string();
            assert!(error.contains("has no place 57"), "{error}");
        }
    }
}

#[test]
fn what_no_generator_can_read_is_refused() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let (config, storage) = model(TEXTS, "whole", DType::F32);
    let error = Generator::new(&compute, &config, &storage, 65).unwrap_err().to_string();
    assert_eq!(error, "65 tokens are wanted, and the model knows 64 positions");
    let mut generator = Generator::new(&compute, &config, &storage, 3).unwrap();
    assert_eq!(generator.logits().unwrap_err().to_string(), "a text must begin with a token");
    assert!(generator.read(61).unwrap_err().to_string().contains("61"));
    let tied = LlamaConfig { tie_word_embeddings: true, ..config };
    let other = tied.build(1).unwrap().layout;
    let other = Storage::private(other, DType::F32, &Allocator::new()).unwrap();
    let untied = LlamaConfig { tie_word_embeddings: false, ..tied };
    let error = Generator::new(&compute, &untied, &other, 3).unwrap_err().to_string();
    assert_eq!(error, "the model has no parameter lm_head.weight");
    let (classifier, storage) = model(SEQUENCES, "classifier", DType::F32);
    let error = Generator::new(&compute, &classifier, &storage, 3).unwrap_err().to_string();
    assert_eq!(error, "a classifier predicts no tokens");
}

/// A prompt of several passes has the logits of one that is read token by token, and a text that is forgotten leaves nothing.
#[test]
fn tokens_that_are_read_at_once_are_those_that_are_read_one_by_one() {
    let in_bf16 = computes().into_iter().map(|(compute, _)| (compute, DType::BF16));
    for (compute, dtype) in computes().into_iter().chain(in_bf16) {
        let (config, storage) = model(TEXTS, "grouped_tied", dtype);
        let config = LlamaConfig { max_position_embeddings: 600, ..config };
        let tokens: Vec<u32> = (0..600).map(|at| at * 7 % 61).collect();
        let mut generator = Generator::new(&compute, &config, &storage, 600).unwrap();
        tokens.iter().for_each(|token| generator.read(*token).unwrap());
        let want = values(&generator.logits().unwrap());
        for parts in [&[600][..], &[1, 599], &[300, 256, 44]] {
            generator.forget();
            let mut rest = &tokens[..];
            for len in parts {
                let (part, left) = rest.split_at(*len);
                generator.read_all(part).unwrap();
                rest = left;
            }
            assert_eq!(generator.position(), 600);
            let got = values(&generator.logits().unwrap());
            let off = largest_difference(&got, &want);
            // Products of several rows may add up in another order. The logits are about one.
            let tolerance = if dtype == DType::BF16 { 0.1 } else { 1e-4 };
            assert!(off <= tolerance, "{dtype} {:?} {parts:?}: {off}", compute.simd());
        }
        let error = generator.read_all(&[1]).unwrap_err().to_string();
        assert!(error.contains("has no place 600"), "{error}");
    }
}

#[test]
fn a_prompt_has_the_bits_of_a_batch_in_evaluation() {
    let tokens: Vec<u32> = (0..40).map(|at| at * 7 % 61).collect();
    for (compute, dtype) in computes() {
        let (config, storage) = model(TEXTS, "whole", dtype);
        let mut generator = Generator::new(&compute, &config, &storage, tokens.len()).unwrap();
        generator.read_all(&tokens).unwrap();
        let numbers: Vec<i64> = tokens.iter().map(|token| i64::from(*token)).collect();
        let inputs = numbers_of(&compute.allocator, &[1, 40], &numbers);
        let (model, batch) = (config.build(1).unwrap(), Batch::new(inputs.clone(), inputs.clone()));
        let (mut units, mut hooks) = (OpenUnits::new(storage.layout()), |_: ParamId| Ok(()));
        let cx = Context::evaluation(&compute, &storage, &mut units, &mut hooks);
        let (rows, _) = model.network().forward(&mut cx.with_batch(&batch), inputs).unwrap();
        let width = config.hidden_size;
        let last = rows.slice(39 * width..40 * width).unwrap().view([1, width]).unwrap();
        let head = storage.value(ParamId(model.layout.params().len() - 1)).unwrap();
        let want = compute.allocator.tensor(dtype, [1, 61], Category::Data).unwrap();
        linear::forward_row(&compute, &last, &head, &want).unwrap();
        assert_eq!(values(&generator.logits().unwrap()), values(&want), "{:?}", compute.simd());
    }
}

/// Logits of f32.
fn logits(elems: &[f64]) -> Tensor {
    let tensor = Allocator::new().tensor(DType::F32, [1, elems.len()], Category::Data).unwrap();
    write(&tensor, elems);
    tensor
}

fn draws(sampling: Sampling, elems: &[f64], count: usize) -> Vec<u32> {
    let (mut sampler, logits) = (TokenSampler::new(sampling).unwrap(), logits(elems));
    (0..count).map(|_| sampler.choose(&logits, &[]).unwrap()).collect()
}

#[test]
fn tokens_are_drawn_with_the_probabilities_of_their_logits() {
    let elems: [f64; 5] = [0.5, -1.0, 2.0, 2.0, -3.0];
    let count = 40_000;
    for (temperature, top_k) in
        [(1.0, None), (0.5, None), (2.0, Some(3)), (1.0, Some(1)), (1.5, Some(9))]
    {
        let sampling = Sampling::Random { temperature, top_k, top_p: None, seed: 7 };
        let drawn = draws(sampling, &elems, count);
        assert_eq!(drawn, draws(sampling, &elems, count), "the same seed");
        // The best tokens are 2, 3, 0, 1, 4; the first one of equals counts as better.
        let kept = &[2, 3, 0, 1, 4][..top_k.unwrap_or(5).min(5)];
        let weight = |token: &usize| (elems[*token] / temperature).exp();
        let sum: f64 = kept.iter().map(weight).sum();
        for token in 0..elems.len() {
            let want = if kept.contains(&token) { weight(&token) / sum } else { 0.0 };
            let got = drawn.iter().filter(|drawn| **drawn == token as u32).count();
            let off = got as f64 / count as f64 - want;
            // Four standard deviations of the most uncertain share.
            assert!(off.abs() <= 0.01, "{temperature} {top_k:?}: {token} off by {off}");
            assert!(want > 0.0 || got == 0, "{temperature} {top_k:?}: {token} was chosen");
        }
    }
    let with = |seed| Sampling::Random { temperature: 1.0, top_k: None, top_p: None, seed };
    assert_ne!(draws(with(1), &elems, 100), draws(with(2), &elems, 100));
    assert_eq!(draws(Sampling::Greedy, &elems, 2), [2, 2]);
}

#[test]
fn top_p_keeps_the_likeliest_tokens_that_reach_it() {
    // Probabilities of 0.5, 0.25, 0.125 and 0.125.
    let elems: Vec<f64> = [4.0f64, 2.0, 1.0, 1.0].map(f64::ln).to_vec();
    for (top_p, top_k, kept) in [
        (0.4, None, 1),
        (0.5, None, 1),
        (0.51, None, 2),
        (0.76, None, 3),
        (0.9, None, 4),
        (1.0, None, 4),
        (0.9, Some(2), 2),
        (0.6, Some(2), 1),
    ] {
        let sampling = Sampling::Random { temperature: 1.0, top_k, top_p: Some(top_p), seed: 3 };
        let drawn = draws(sampling, &elems, 400);
        let largest = drawn.iter().max().unwrap();
        assert_eq!(*largest, kept - 1, "{top_p} {top_k:?}");
    }
}

#[test]
fn a_repetition_penalty_makes_tokens_that_occurred_less_likely() {
    let choose = |penalty: f64, elems: &[f64], before: &[u32]| {
        let sampler = TokenSampler::new(Sampling::Greedy).unwrap();
        let mut sampler = sampler.with_repetition_penalty(penalty).unwrap();
        sampler.choose(&logits(elems), before).unwrap()
    };
    assert_eq!(choose(1.0, &[3.0, 2.0], &[0]), 0);
    assert_eq!(choose(2.0, &[3.0, 2.0], &[0]), 1);
    assert_eq!(choose(1.4, &[3.0, 2.0], &[0, 0, 0]), 0, "each token counts once");
    assert_eq!(choose(2.0, &[-2.0, -3.0], &[0]), 1, "below zero it multiplies");
    assert_eq!(choose(2.0, &[3.0, 2.0], &[9]), 0);
    for penalty in [0.0, -1.0, f64::NAN] {
        let sampler = TokenSampler::new(Sampling::Greedy).unwrap();
        let error = sampler.with_repetition_penalty(penalty).unwrap_err().to_string();
        assert!(error.ends_with("must be above zero"), "{error}");
    }
}

#[test]
fn settings_and_logits_that_allow_no_choice_are_refused() {
    let refusal = |temperature, top_k| {
        TokenSampler::new(Sampling::Random { temperature, top_k, top_p: None, seed: 0 })
            .unwrap_err()
            .to_string()
    };
    for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let expected = format!("the temperature is {temperature}, and must be above zero");
        assert_eq!(refusal(temperature, None), expected);
    }
    for top_p in [0.0, 1.1, f64::NAN] {
        let sampling =
            Sampling::Random { temperature: 1.0, top_k: None, top_p: Some(top_p), seed: 0 };
        let error = TokenSampler::new(sampling).unwrap_err().to_string();
        assert!(error.ends_with("is not above zero and at most one"), "{error}");
    }
    assert_eq!(refusal(1.0, Some(0)), "the best 0 tokens leave none to choose");
    for sampling in
        [Sampling::Greedy, Sampling::Random { temperature: 1.0, top_k: None, top_p: None, seed: 0 }]
    {
        let mut sampler = TokenSampler::new(sampling).unwrap();
        let error = sampler.choose(&logits(&[0.0, f64::NAN, 1.0]), &[]).unwrap_err().to_string();
        assert!(error.starts_with("the logit of token 1 is NaN"), "{error}");
    }
}
