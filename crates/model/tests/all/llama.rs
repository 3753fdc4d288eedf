//! Whole Llamas against `transformers`' results, which `fixtures/make_llama.py` stored in `fixtures/llama.safetensors`.

use crate::common::{self, initialized, stored, sums, values, write};
use paceline_kernels::optimizer::AdamW;
use paceline_kernels::{Bf16Products, Compute, SimdLevel};
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{
    Batch, Context, Layer, LlamaConfig, LlamaTask, Model, OpenUnits, Optimizer, OptimizerConfig,
    ParamId, Precision, SpecialTokens, Storage,
};
use safetensors::SafeTensors;
use serde_json::json;

static FILE: &[u8] = include_bytes!("../fixtures/llama.safetensors");

/// Every case of the file, so that none is forgotten.
const CASES: [&str; 8] = [
    "causal",
    "classifier",
    "classifier_grouped",
    "grouped",
    "linear_scaling",
    "llama3_scaling",
    "theta",
    "tied",
];

const STEPS: usize = 10;

fn metadata(key: &str) -> String {
    let (_, header) = SafeTensors::read_metadata(FILE).unwrap();
    header.metadata().as_ref().unwrap()[key].clone()
}

/// A case, computed with an element type and vector instructions.
struct Case {
    name: &'static str,
    compute: Compute,
    model: Model,
    storage: Storage,
    batch: Batch,
    /// The largest error of outputs and gradients, relative to the largest expected value of a tensor.
    tolerance: f64,
}

impl Case {
    fn all(name: &'static str) -> Vec<Self> {
        let compute = |threads| Compute::new(threads, Allocator::new()).unwrap();
        // `transformers` computes norms and angles in f32, whatever the type of the model.
        let mut cases = vec![Self::new(name, compute(1), DType::F64, 1e-5)];
        for level in SimdLevel::available() {
            let compute = compute(2).with_simd(level).unwrap();
            // Two layers of f32 sums. A wrong term would cause an error of about one.
            cases.push(Self::new(name, compute, DType::F32, 2e-5));
        }
        cases
    }

    fn new(
        name: &'static str,
        compute: Compute,
        precision: impl Into<Precision>,
        tolerance: f64,
    ) -> Self {
        let config = LlamaConfig::from_json(&metadata(name)).unwrap();
        let model = config.build(1).unwrap();
        let storage =
            Storage::private(model.layout.clone(), precision, &compute.allocator).unwrap();
        for (at, param) in model.layout.params().iter().enumerate() {
            let (shape, weight) = stored(FILE, &format!("{name}.weight.{}", param.name));
            assert_eq!(shape, param.shape.dims(), "{}", param.name);
            write(&storage.value(ParamId(at)).unwrap(), &weight);
        }
        let integers = |what: &str| {
            let file = SafeTensors::deserialize(FILE).unwrap();
            let from = file.tensor(&format!("{name}.batch.{what}")).unwrap();
            let to = compute.allocator.tensor(DType::I64, from.shape(), Category::Data).unwrap();
            to.as_bytes().write::<u8>().unwrap().copy_from_slice(from.data());
            to
        };
        let batch = Batch::new(integers("inputs"), integers("targets"));
        let batch = batch.with(Batch::LENGTHS, integers("lengths"));
        Self { name, compute, model, storage, batch, tolerance }
    }

    /// The mean loss, with the gradients in the storage.
    fn train(&self) -> f64 {
        let Self { compute, model, storage, batch, .. } = self;
        let sums = sums(&compute.allocator);
        let mut finals = Vec::new();
        let mut ready = |id: ParamId| {
            finals.push(id);
            Ok(())
        };
        let mut units = OpenUnits::new(&model.layout);
        let cx = Context::training(compute, storage, &mut units, &mut ready);
        let mut cx = cx.with_batch(batch);
        cx.open_roots().unwrap();
        let inputs = batch.inputs().clone();
        let (output, saved) = model.network().forward(&mut cx, inputs).unwrap();
        let count = model.objective.count(batch).unwrap();
        let d_output =
            model.differentiate(&mut cx, &output, 1.0 / count as f64, &sums, None).unwrap();
        model.backward(&mut cx, saved, d_output).unwrap();
        finals.sort();
        let every: Vec<ParamId> = model.layout.trained().map(|(id, _)| id).collect();
        assert_eq!(finals, every, "every gradient is announced once");
        let sums = sums.read::<f64>().unwrap();
        assert_eq!(sums[2], count as f64);
        sums[0] / count as f64
    }

    #[track_caller]
    fn close(&self, got: &[f64], what: &str, tolerance: f64) {
        let (_, want) = stored(FILE, &format!("{}.{what}", self.name));
        assert_eq!(got.len(), want.len(), "{what}");
        let largest = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            let setting = (self.name, self.storage.precision().compute, self.compute.simd());
            let off = (got - want).abs();
            assert!(off <= tolerance * largest, "{setting:?} {what}[{at}]: {got}, not {want}");
        }
    }
}

#[test]
fn the_file_holds_the_cases_that_are_tested_here() {
    let (_, header) = SafeTensors::read_metadata(FILE).unwrap();
    let mut names: Vec<String> = header.metadata().clone().unwrap().into_keys().collect();
    names.retain(|name| !["adamw", "transformers"].contains(&&**name));
    names.sort();
    assert_eq!(names, CASES);
}

#[test]
fn loss_and_gradients_are_those_of_transformers() {
    for name in CASES {
        for case in Case::all(name) {
            let loss = case.train();
            case.close(&[loss], "result.loss", case.tolerance);
            for (at, param) in case.model.layout.params().iter().enumerate() {
                let grad = values(&case.storage.grad(ParamId(at)).unwrap());
                case.close(&grad, &format!("grad.{}", param.name), case.tolerance);
            }
        }
    }
}

#[test]
fn ten_steps_of_adamw_end_with_the_weights_of_transformers() {
    let config = adamw();
    for name in CASES {
        for case in Case::all(name) {
            let allocator = &case.compute.allocator;
            let mut optimizer = Optimizer::new(config, &case.storage, allocator).unwrap();
            for _ in 0..STEPS {
                case.train();
                optimizer.step(&case.compute, &case.storage).unwrap();
            }
            for (at, param) in case.model.layout.params().iter().enumerate() {
                let value = values(&case.storage.value(ParamId(at)).unwrap());
                // AdamW divides by the gradient's own size, so it keeps the relative error of the smallest gradients.
                case.close(&value, &format!("after.{}", param.name), 50.0 * case.tolerance);
            }
        }
    }
}

/// Every form of products in bf16 of this machine.
fn bf16_computes() -> Vec<Compute> {
    let new = || Compute::new(2, Allocator::new()).unwrap();
    let levels = SimdLevel::available().into_iter();
    let widened = levels.map(|level| (level, Bf16Products::Widened));
    let narrow = [Bf16Products::Dots, Bf16Products::Amx].map(|way| (SimdLevel::detect(), way));
    widened
        .chain(narrow)
        .filter_map(|(level, way)| new().with_simd(level)?.with_bf16_products(way))
        .collect()
}

/// The norm of the difference, relative to the norm of what was expected.
fn distance(got: &[f64], want: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
    difference / norm(&mut want.iter().copied())
}

#[test]
fn gradients_in_bf16_are_near_those_of_transformers() {
    for name in CASES {
        for compute in bf16_computes() {
            let setting = format!("{name} {:?} {:?}", compute.simd(), compute.bf16_products());
            let case = Case::new(name, compute, Precision::BF16, 0.01);
            let loss = case.train();
            case.close(&[loss], "result.loss", case.tolerance);
            let (mut all, mut wanted) = (Vec::new(), Vec::new());
            for (at, param) in case.model.layout.params().iter().enumerate() {
                let grad = case.storage.grad(ParamId(at)).unwrap();
                assert_eq!(grad.dtype(), DType::F32);
                all.extend(values(&grad));
                wanted.extend(stored(FILE, &format!("{name}.grad.{}", param.name)).1);
            }
            // A number is off by up to 2^-8 each time that it is stored. The weights of the cases are large, so that each
            // block makes the errors of the one before several times larger.
            let off = distance(&all, &wanted);
            assert!(off < 0.1, "{setting}: off by {off}");
        }
    }
}

/// A model with initial weights of the usual size.
#[test]
fn gradients_in_bf16_are_near_those_in_f32() {
    let config = LlamaConfig {
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        initializer_range: 0.02,
        ..LlamaConfig::from_json(&metadata("causal")).unwrap()
    };
    let gradients = |compute: Compute, precision| {
        let like = Case::new("causal", compute, precision, 0.0);
        let model = config.build(1).unwrap();
        let storage = Storage::private(model.layout.clone(), precision, &like.compute.allocator);
        let storage = storage.unwrap();
        storage.initialize(5).unwrap();
        let case = Case { model, storage, ..like };
        case.train();
        values(case.storage.grads().tensor())
    };
    let wide = gradients(Compute::new(1, Allocator::new()).unwrap(), Precision::F32);
    for compute in bf16_computes() {
        let setting = format!("{:?} {:?}", compute.simd(), compute.bf16_products());
        let narrow = gradients(compute, Precision::BF16);
        let off = distance(&narrow, &wide);
        // The cosine of the angle between them is then above 0.9998.
        assert!(off > 0.0 && off < 0.02, "{setting}: off by {off}");
    }
}

#[test]
fn steps_in_bf16_lower_the_loss_as_in_f32() {
    let config = adamw();
    let losses = |name, compute: Compute, precision: Precision| {
        let case = Case::new(name, compute, precision, 0.0);
        let mut optimizer = Optimizer::new(config, &case.storage, &case.compute.allocator).unwrap();
        let step = |_| {
            let loss = case.train();
            optimizer.step(&case.compute, &case.storage).unwrap();
            loss
        };
        (0..=STEPS).map(step).collect::<Vec<_>>()
    };
    for name in CASES {
        let compute = || Compute::new(1, Allocator::new()).unwrap();
        let wide = losses(name, compute(), Precision::F32);
        assert!(wide[STEPS] < wide[0], "{name}: {wide:?}");
        for compute in bf16_computes() {
            let narrow = losses(name, compute, Precision::BF16);
            let (fell, fell_wide) = (narrow[0] - narrow[STEPS], wide[0] - wide[STEPS]);
            assert!((fell / fell_wide - 1.0).abs() < 0.05, "{name}: {narrow:?}, not {wide:?}");
        }
    }
}

fn adamw() -> OptimizerConfig {
    let stored: serde_json::Value = serde_json::from_str(&metadata("adamw")).unwrap();
    let number = |pointer: &str| stored.pointer(pointer).unwrap().as_f64().unwrap();
    let [beta1, beta2] = ["/betas/0", "/betas/1"].map(number);
    let [lr, eps, weight_decay] = ["/lr", "/eps", "/weight_decay"].map(number);
    OptimizerConfig::AdamW(AdamW { lr, beta1, beta2, eps, weight_decay })
}

#[test]
fn a_config_file_is_read_written_and_checked() {
    for name in CASES {
        let text = metadata(name);
        let config = LlamaConfig::from_json(&text).unwrap();
        assert_eq!(LlamaConfig::from_json(&config.to_json().to_string()).unwrap(), config);
        let labels = match name {
            "classifier" => Some(5),
            "classifier_grouped" => Some(3),
            _ => None,
        };
        let task = labels.map(|num_labels| LlamaTask::Classification { num_labels });
        assert_eq!(config.task, task.unwrap_or(LlamaTask::LanguageModel));
    }
    let change = |key: &str, value: serde_json::Value| {
        let mut config: serde_json::Value = serde_json::from_str(&metadata("causal")).unwrap();
        config[key] = value;
        LlamaConfig::from_json(&config.to_string()).unwrap_err().to_string()
    };
    // The value of rope_scaling is wrong even where rope_parameters count.
    let cases = r#"
        hidden_size: null => hidden_size is missing
        hidden_size: -1 => hidden_size is -1, and must be a whole number
        hidden_size: 0 => hidden_size must be above zero
        head_dim: 7 => head_dim 7 must be even, because rotary positions rotate pairs
        num_key_value_heads: 3 => num_attention_heads 2 must be a multiple of num_key_value_heads 3
        hidden_act: "gelu" => hidden_act is gelu, which is not supported; it must be silu
        attention_bias: true => attention_bias is true, which is not supported; it must be false
        attention_dropout: 0.1 => attention_dropout is 0.1, which is not supported; it must be 0
        quantization_config: {"quant_method": "gptq"} => quantization_config is set, which is not supported; it must be absent, with weights in f32, f16 or bf16
        rms_norm_eps: "a" => rms_norm_eps is "a", and must be a number
        architectures: null => architectures is missing; it must be ["LlamaForCausalLM"] or
        architectures: ["GPT2LMHeadModel"] => the architecture is GPT2LMHeadModel, which is not supported; it must be LlamaForCausalLM or
        rope_parameters: {"rope_type": "yarn"} => rope_type is yarn, which is not supported; it must be default, linear or llama3
        rope_parameters: {"rope_type": "linear"} => factor is missing
        rope_parameters: "llama3" => rope_parameters is "llama3", and must be an object
        rope_scaling: "llama3" => rope_scaling is "llama3", and must be an object
        num_hidden_layers: 10000000000 => num_hidden_layers 10000000000 must be 10000 or less
        bos_token_id: [1] => bos_token_id is [1], and must be a token
        eos_token_id: "end" => eos_token_id is "end", and must be a token or a list of tokens
        pad_token_id: -2 => pad_token_id is -2, and must be a token
        head_dim: 4294967296 => head_dim 4294967296 must be 65536 or less
        vocab_size: 18446744073709551615 => vocab_size 18446744073709551615 must be 16777216
        hidden_size: 1099511627776 => hidden_size 1099511627776 must be 16777216 or less
        intermediate_size: 4294967296 => intermediate_size 4294967296 must be 16777216
        num_attention_heads: 4294967296 => num_attention_heads 4294967296 must be 16777216
        max_position_embeddings: 16777217 => max_position_embeddings 16777217 must be 16777216
        initializer_range: -0.1 => initializer_range -0.1 must not be negative
        partial_rotary_factor: 0.5 => partial_rotary_factor is 0.5, which is not supported
        rope_parameters: {"full_attention": {"rope_type": "default"}} => rope_parameters states rotary positions of their own for full_attention
        rope_parameters: {"rope_type": "linear", "type": "longrope", "factor": 2} => rope_parameters has the rope_type "linear" and the type "longrope"
    "#;
    for case in cases.lines().map(str::trim).filter(|case| !case.is_empty()) {
        let (stated, expected) = case.split_once(" => ").unwrap();
        let (key, value) = stated.split_once(": ").unwrap();
        let error = change(key, serde_json::from_str(value).unwrap());
        assert!(error.starts_with(expected), "{key} {value}: {error}");
    }
    let error = LlamaConfig::from_json("[]").unwrap_err().to_string();
    assert_eq!(error, "this is no JSON object");
}

#[test]
fn classes_have_the_names_of_the_file() {
    let names = |labels: serde_json::Value| {
        LlamaConfig::class_names(&json!({ "id2label": labels }).to_string())
    };
    assert_eq!(names(json!({"1": "bad", "0": "good"})), ["good", "bad"]);
    for without in [
        json!(null),
        json!({"0": "LABEL_0", "1": "LABEL_1"}),
        json!({"0": "good", "1": "good"}),
        json!({"0": "good", "2": "bad"}),
        json!({"0": "good", "1": 7}),
    ] {
        assert_eq!(names(without.clone()), [""; 0], "{without}");
    }
    assert_eq!(LlamaConfig::class_names("{"), [""; 0]);
}

/// The largest sizes that are read, all at once.
#[test]
fn sizes_together_are_bounded() {
    let mut config = LlamaConfig::from_json(&metadata("causal")).unwrap();
    config.num_hidden_layers = LlamaConfig::MAX_LAYERS;
    config.hidden_size = LlamaConfig::MAX_SIZE;
    config.intermediate_size = LlamaConfig::MAX_SIZE;
    let error = config.check().unwrap_err().to_string();
    assert!(error.starts_with("the number of parameters "), "{error}");
    assert!(error.contains(&format!("must be {} or less", LlamaConfig::MAX_PARAMS)), "{error}");
    config.task = LlamaTask::Classification { num_labels: 1 << 40 };
    let error = config.check().unwrap_err().to_string();
    assert!(error.starts_with("num_labels 1099511627776 must be 65536 or less"), "{error}");
}

/// Versions of `transformers` differ in which of the keys they read.
#[test]
fn rotary_positions_that_are_stated_twice_must_agree() {
    let read = |stated: serde_json::Value| {
        let mut config: serde_json::Value = serde_json::from_str(&metadata("causal")).unwrap();
        let config = config.as_object_mut().unwrap();
        config.retain(|key, _| !key.starts_with("rope"));
        config.extend(stated.as_object().unwrap().clone());
        LlamaConfig::from_json(&json!(config).to_string()).map_err(|error| error.to_string())
    };
    let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor});
    for (stated, expected) in [
        (
            json!({"rope_parameters": linear(2.0), "rope_scaling": linear(4.0)}),
            "rope_parameters and rope_scaling disagree (linear, linear)",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": linear(4.0)}),
            "rope_parameters and rope_scaling disagree (default, linear)",
        ),
        (
            json!({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "longrope"}}),
            "rope_type is longrope, which is not supported",
        ),
        (
            json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
            "rope_theta is 10000 in rope_theta and 500000 in rope_parameters",
        ),
    ] {
        let error = read(stated.clone()).unwrap_err();
        assert!(error.starts_with(expected), "{stated}: {error}");
    }
    let twice = json!({
        "rope_theta": 7.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    });
    let config = read(twice).unwrap();
    assert_eq!(config.rope_theta, 7.0);
    assert!(config.rope_scaling.is_some());
    // An empty object states nothing.
    let config = read(json!({"rope_parameters": {}, "rope_scaling": linear(3.0)})).unwrap();
    assert!(config.rope_scaling.is_some());
}

/// The row that `transformers` classifies by is the last one whose token is not the padding's, even if the text ends with
/// that token.
#[test]
fn a_text_that_ends_with_the_padding_is_classified_by_the_token_before() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let mut config = LlamaConfig::from_json(&metadata("classifier")).unwrap();
    let loss = |config: &LlamaConfig, inputs: &[i64], length: i64| {
        let model = config.build(1).unwrap();
        let storage = initialized(&model, DType::F64, &compute.allocator, 3);
        let integers =
            |shape: &[usize], values: &[i64]| common::integers(&compute.allocator, shape, values);
        let batch = Batch::new(integers(&[1, inputs.len()], inputs), integers(&[1], &[1]));
        let batch = batch.with(Batch::LENGTHS, integers(&[1], &[length]));
        common::train(&model, &compute, &storage, &batch, 1.0)[0]
    };
    // Sums over more positions may be rounded in another way.
    let alike = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let ended = [3, 4, 2, 0];
    config.special_tokens.pad = Some(2);
    assert!(alike(loss(&config, &ended, 3), loss(&config, &[3, 4], 2)));
    // A text of nothing else is classified by its first token.
    assert!(alike(loss(&config, &[2, 2, 2], 3), loss(&config, &[2], 1)));
    config.special_tokens.pad = None;
    assert!(!alike(loss(&config, &ended, 3), loss(&config, &[3, 4], 2)));
}

#[test]
fn special_tokens_are_written_as_they_were_read() {
    for (stated, begin, ends, pad) in [
        (
            json!({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
            Some(1),
            vec![2],
            Some(0),
        ),
        (json!({"eos_token_id": [2, 7], "pad_token_id": null}), None, vec![2, 7], None),
        (json!({}), None, vec![], None),
        // Early files say so where there is none.
        (json!({"bos_token_id": 1, "pad_token_id": -1}), Some(1), vec![], None),
    ] {
        let mut file: serde_json::Value = serde_json::from_str(&metadata("causal")).unwrap();
        let file = file.as_object_mut().unwrap();
        file.retain(|key, _| !key.ends_with("_token_id"));
        file.extend(stated.as_object().unwrap().clone());
        let config = LlamaConfig::from_json(&json!(file).to_string()).unwrap();
        assert_eq!(config.special_tokens, SpecialTokens { begin, ends, pad });
        let written = config.to_json();
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            let is_token = |value: &&serde_json::Value| **value != json!(-1) && !value.is_null();
            assert_eq!(written.get(key), stated.get(key).filter(is_token), "{key}");
        }
    }
}

#[test]
fn smollm2_as_a_classifier_has_its_published_tensors() {
    let config = LlamaConfig {
        vocab_size: 49_152,
        hidden_size: 960,
        intermediate_size: 2560,
        num_hidden_layers: 32,
        num_attention_heads: 15,
        num_key_value_heads: 5,
        head_dim: 64,
        max_position_embeddings: 8192,
        rope_theta: 100_000.0,
        rope_scaling: None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: true,
        task: LlamaTask::Classification { num_labels: 5 },
        special_tokens: SpecialTokens::default(),
    };
    let layout = config.build(2).unwrap().layout;
    assert_eq!((layout.params().len(), layout.num_params()), (291, 361_825_920));
    // MiB of all parameters, as published, with two decimals.
    let mib = layout.num_params() as f64 * 4.0 / f64::from(1 << 20);
    assert_eq!(format!("{mib:.2}"), "1380.26");
    // Padding adds less than a thousandth.
    assert!(layout.len() - layout.num_params() < layout.num_params() / 1000);
}
