//! Whole Llamas against `transformers`' results, which `fixtures/make_llama.py` stored in `fixtures/llama.safetensors`.

use paceline_kernels::optimizer::AdamW;
use paceline_kernels::{Compute, SimdLevel};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, Context, Layer, LlamaConfig, LlamaTask, Model, OpenUnits, Optimizer, OptimizerConfig,
    ParamId, Storage,
};
use safetensors::SafeTensors;

static FILE: &[u8] = include_bytes!("fixtures/llama.safetensors");

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

/// Shape and elements of a stored f32 tensor.
fn stored(name: &str) -> (Vec<usize>, Vec<f64>) {
    let file = SafeTensors::deserialize(FILE).unwrap();
    let tensor = file.tensor(name).unwrap_or_else(|_| panic!("{name} is not in the file"));
    let elems = tensor.data().chunks_exact(4).map(|bytes| bytes.try_into().unwrap());
    (tensor.shape().to_vec(), elems.map(|bytes| f64::from(f32::from_le_bytes(bytes))).collect())
}

fn values(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DType::F64 => tensor.read::<f64>().unwrap().to_vec(),
        _ => tensor.read::<f32>().unwrap().iter().map(|x| f64::from(*x)).collect(),
    }
}

fn set(tensor: &Tensor, values: &[f64]) {
    match tensor.dtype() {
        DType::F64 => tensor.write::<f64>().unwrap().copy_from_slice(values),
        _ => {
            for (to, from) in tensor.write::<f32>().unwrap().iter_mut().zip(values) {
                *to = *from as f32;
            }
        }
    }
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

    fn new(name: &'static str, compute: Compute, dtype: DType, tolerance: f64) -> Self {
        let config = LlamaConfig::from_json(&metadata(name)).unwrap();
        let model = config.build(1).unwrap();
        let storage = Storage::host(model.layout.clone(), dtype, &compute.allocator).unwrap();
        for (at, param) in model.layout.params().iter().enumerate() {
            let (shape, weight) = stored(&format!("{name}.weight.{}", param.name));
            assert_eq!(shape, param.shape.dims(), "{}", param.name);
            set(&storage.value(ParamId(at)).unwrap(), &weight);
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
        let sums = compute.allocator.tensor(DType::F64, [3], Category::Workspace).unwrap();
        sums.fill_zero().unwrap();
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
        let d_output = model.differentiate(&mut cx, &output, 1.0 / count as f64, &sums).unwrap();
        model.network().backward(&mut cx, saved, d_output, false).unwrap();
        finals.sort();
        let every: Vec<ParamId> = model.layout.trained().map(|(id, _)| id).collect();
        assert_eq!(finals, every, "every gradient is announced once");
        let sums = sums.read::<f64>().unwrap();
        assert_eq!(sums[2], count as f64);
        sums[0] / count as f64
    }

    #[track_caller]
    fn close(&self, got: &[f64], what: &str, tolerance: f64) {
        let (_, want) = stored(&format!("{}.{what}", self.name));
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
    let AdamWSettings { lr, betas, eps, weight_decay } = AdamWSettings::read();
    let config =
        OptimizerConfig::AdamW(AdamW { lr, beta1: betas.0, beta2: betas.1, eps, weight_decay });
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

struct AdamWSettings {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
}

impl AdamWSettings {
    fn read() -> Self {
        let stored: serde_json::Value = serde_json::from_str(&metadata("adamw")).unwrap();
        let number = |value: &serde_json::Value| value.as_f64().unwrap();
        let betas = (number(&stored["betas"][0]), number(&stored["betas"][1]));
        let [lr, eps, weight_decay] = ["lr", "eps", "weight_decay"].map(|key| number(&stored[key]));
        Self { lr, betas, eps, weight_decay }
    }
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
    for (key, value, expected) in [
        ("hidden_size", "null", "hidden_size is missing"),
        ("hidden_size", "-1", "hidden_size is -1, and must be a whole number"),
        ("hidden_size", "0", "hidden_size must be above zero"),
        ("head_dim", "7", "head_dim 7 must be even, because rotary positions rotate pairs"),
        (
            "num_key_value_heads",
            "3",
            "num_attention_heads 2 must be a multiple of num_key_value_heads 3",
        ),
        ("hidden_act", "\"gelu\"", "hidden_act is gelu, which is not supported; it must be silu"),
        (
            "attention_bias",
            "true",
            "attention_bias is true, which is not supported; it must be false",
        ),
        ("rms_norm_eps", "\"a\"", "rms_norm_eps is \"a\", and must be a number"),
        ("architectures", "null", "architectures is missing; it must be [\"LlamaForCausalLM\"] or"),
        (
            "architectures",
            "[\"GPT2LMHeadModel\"]",
            "the architecture is GPT2LMHeadModel, which is not supported; it must be LlamaForCausalLM or",
        ),
        (
            "rope_parameters",
            "{\"rope_type\": \"yarn\"}",
            "rope_type is yarn, which is not supported; it must be default, linear or llama3",
        ),
        ("rope_parameters", "{\"rope_type\": \"linear\"}", "factor is missing"),
    ] {
        let error = change(key, serde_json::from_str(value).unwrap());
        assert!(error.starts_with(expected), "{key} {value}: {error}");
    }
    let error = LlamaConfig::from_json("[]").unwrap_err().to_string();
    assert_eq!(error, "this is no JSON object");
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
    };
    let layout = config.build(2).unwrap().layout;
    assert_eq!((layout.params().len(), layout.num_params()), (291, 361_825_920));
    // MiB of all parameters, as published, with two decimals.
    let mib = layout.num_params() as f64 * 4.0 / f64::from(1 << 20);
    assert_eq!(format!("{mib:.2}"), "1380.26");
    // Padding adds less than a thousandth.
    assert!(layout.len() - layout.num_params() < layout.num_params() / 1000);
}
