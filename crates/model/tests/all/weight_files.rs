//! Weight files: saved values are restored with the same bits. Files that are damaged, or belong to a
//! different model or optimizer, are refused with a message that says what differs.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use paceline_kernels::Compute;
use paceline_kernels::optimizer::{AdamW, Sgd};
use paceline_memory::{Allocator, DType};
use paceline_model::weights::{WeightFile, write};
use paceline_model::{
    BufferId, Init, LayoutBuilder, MlpConfig, ModelError, Optimizer, OptimizerConfig, Storage,
};
use tempfile::TempDir;

const SGD: OptimizerConfig =
    OptimizerConfig::Sgd(Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01 });
const PLAIN_SGD: OptimizerConfig =
    OptimizerConfig::Sgd(Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.0 });
const ADAMW: OptimizerConfig = OptimizerConfig::AdamW(AdamW {
    lr: 0.01,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.1,
});

/// Output width and hidden width are the same, so that a deeper network begins with the same shapes.
const SMALL: MlpConfig =
    MlpConfig { input_dim: 3, hidden_dim: 4, output_dim: 4, num_layers: 1, tie_layers: false };

/// Parameters and an optimizer, without a network.
struct Trainee {
    compute: Compute,
    storage: Storage,
    optimizer: Optimizer,
}

impl Trainee {
    fn new(model: &MlpConfig, optimizer: OptimizerConfig, dtype: DType, world_size: usize) -> Self {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let layout = model.build(world_size).unwrap().layout;
        let storage = Storage::private(layout, dtype, &compute.allocator).unwrap();
        storage.initialize(7).unwrap();
        let optimizer = Optimizer::new(optimizer, &storage, &compute.allocator).unwrap();
        Self { compute, storage, optimizer }
    }

    /// A step with gradients that differ from step to step. Only for f32.
    fn step(&mut self) {
        let factor = 0.1 * (self.optimizer.steps() + 1) as f32;
        let values = self.storage.values().tensor().read::<f32>().unwrap().to_vec();
        let mut grads = self.storage.grads().tensor().write::<f32>().unwrap();
        grads.iter_mut().zip(values).for_each(|(grad, value)| *grad = factor * value);
        drop(grads);
        self.optimizer.step(&self.compute, &self.storage).unwrap();
    }

    fn save(&self, path: &Path) {
        self.save_with(path, &BTreeMap::new());
    }

    fn save_with(&self, path: &Path, metadata: &BTreeMap<String, String>) {
        let mut file = fs::File::create(path).unwrap();
        write(&mut file, &self.storage, &self.optimizer, metadata).unwrap();
    }
}

/// A trained small network in a file.
fn saved(optimizer: OptimizerConfig) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("weights.safetensors");
    let mut trainee = Trainee::new(&SMALL, optimizer, DType::F32, 1);
    trainee.step();
    trainee.save(&path);
    (folder, path)
}

/// The message of a file that must be refused, checked to be about the file itself.
fn refusal(path: &Path) -> String {
    let error = WeightFile::open(path).unwrap_err();
    assert!(matches!(error, ModelError::File { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&path.display().to_string()), "{text}");
    text
}

#[test]
fn training_goes_on_from_a_file_as_if_it_had_not_stopped() {
    for config in [SGD, PLAIN_SGD, ADAMW] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("weights.safetensors");
        let mut first = Trainee::new(&SMALL, config, DType::F32, 1);
        first.step();
        first.step();
        let metadata = BTreeMap::from([("step".into(), "2".into()), ("note".into(), "ä\n".into())]);
        first.save_with(&path, &metadata);

        // With a different number of ranks, storage has different padding. The file has no padding.
        let mut second = Trainee::new(&SMALL, config, DType::F32, 3);
        second.step();
        let file = WeightFile::open(&path).unwrap();
        for (key, value) in &metadata {
            assert_eq!(file.metadata().get(key), Some(value));
        }
        file.restore(&second.storage, &second.optimizer).unwrap();
        second.optimizer.resume_after(2);
        assert_eq!(second.storage.digest().unwrap(), first.storage.digest().unwrap());
        // The optimizer state is the same too.
        for _ in 0..3 {
            first.step();
            second.step();
        }
        assert_eq!(second.storage.digest().unwrap(), first.storage.digest().unwrap(), "{config:?}");
    }
}

#[test]
fn a_model_is_read_whatever_optimizer_it_was_trained_with() {
    for config in [SGD, PLAIN_SGD, ADAMW] {
        let (_folder, path) = saved(config);
        let file = WeightFile::open(&path).unwrap();
        let read = Trainee::new(&SMALL, PLAIN_SGD, DType::F32, 3);
        file.restore_model(&read.storage).unwrap();
        let mut written = Trainee::new(&SMALL, config, DType::F32, 1);
        assert_ne!(read.storage.digest().unwrap(), written.storage.digest().unwrap());
        written.step();
        assert_eq!(read.storage.digest().unwrap(), written.storage.digest().unwrap());
    }
}

#[test]
fn a_writer_that_fails_is_an_error() {
    /// Takes so many bytes, and then is full.
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = self.0.min(bytes.len());
            self.0 -= taken;
            if taken == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let trainee = Trainee::new(&SMALL, SGD, DType::F32, 1);
    let write =
        |out: &mut dyn Write| write(out, &trainee.storage, &trainee.optimizer, &BTreeMap::new());
    let mut whole = Vec::new();
    write(&mut whole).unwrap();
    for room in 0..whole.len() {
        let error = write(&mut Full(room)).unwrap_err();
        assert!(matches!(error, ModelError::Write(_)), "{room} bytes: {error}");
    }
    write(&mut Full(whole.len())).unwrap();
}

#[test]
fn what_is_not_finite_is_named() {
    let mut trainee = Trainee::new(&SMALL, ADAMW, DType::F32, 1);
    trainee.step();
    assert_eq!(trainee.storage.first_not_finite().unwrap(), None);
    assert_eq!(trainee.optimizer.first_not_finite().unwrap(), None);
    let last = trainee.storage.layout().params().last().unwrap().range();
    let (_, tensor) = trainee.optimizer.state_of(last).unwrap().remove(1);
    tensor.write::<f32>().unwrap()[3] = f32::INFINITY;
    assert_eq!(trainee.optimizer.first_not_finite().unwrap(), Some("second_moment"));
    let last = trainee.storage.layout().params().last().unwrap();
    trainee.storage.values().slice(last.range()).unwrap().write::<f32>().unwrap()[0] = f32::NAN;
    assert_eq!(trainee.storage.first_not_finite().unwrap(), Some(last.name.as_str()));
}

#[test]
fn a_truncated_file_is_corrupt() {
    let (_folder, path) = saved(ADAMW);
    let whole = fs::read(&path).unwrap();
    for len in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        let text = refusal(&path);
        assert!(text.contains("is corrupt"), "{len} bytes: {text}");
    }
}

#[test]
fn a_flipped_bit_of_any_tensor_is_noticed() {
    let (_folder, path) = saved(SGD);
    let whole = fs::read(&path).unwrap();
    let header_bytes = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in (8 + header_bytes..whole.len()).step_by(5) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(&path, damaged).unwrap();
        let text = refusal(&path);
        assert!(text.contains("is corrupt: its contents do not match its digest"), "{text}");
    }
}

#[test]
fn other_files_are_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("weights");
    assert!(refusal(&path).contains("cannot be read"));
    fs::write(&path, "These are the weights of another kind of model entirely.").unwrap();
    assert!(refusal(&path).contains("is corrupt"));
    let nothing: [(&str, safetensors::tensor::TensorView); 0] = [];
    fs::write(&path, safetensors::serialize(nothing, None).unwrap()).unwrap();
    let text = refusal(&path);
    assert!(text.contains("has no digest, so it is no checkpoint of ours"), "{text}");
}

/// The error of `WeightFile` for a model other than the one in the file. Checks that nothing was copied.
fn difference(path: &Path, model: MlpConfig, optimizer: OptimizerConfig, dtype: DType) -> String {
    let other = Trainee::new(&model, optimizer, dtype, 1);
    let before = other.storage.digest().unwrap();
    let file = WeightFile::open(path).unwrap();
    let error = file.restore(&other.storage, &other.optimizer).unwrap_err();
    assert!(matches!(error, ModelError::OtherModel { .. }), "{error}");
    assert_eq!(other.storage.digest().unwrap(), before);
    let prefix = format!("{}: ", path.display());
    error.to_string().strip_prefix(&prefix).expect("it names the file").to_string()
}

#[test]
fn another_architecture_is_refused_by_its_first_difference() {
    let (_folder, path) = saved(SGD);
    let refused = |model, expected: &str| {
        assert_eq!(difference(&path, model, SGD, DType::F32), expected);
    };
    let wider = MlpConfig { hidden_dim: 5, ..SMALL };
    refused(wider, "parameter fc0.weight has shape [4, 3] there, and [5, 3] in this model");
    let narrower = MlpConfig { output_dim: 2, ..SMALL };
    refused(narrower, "parameter fc1.weight has shape [4, 4] there, and [2, 4] in this model");
    let deeper = MlpConfig { num_layers: 2, ..SMALL };
    refused(deeper, "it has no parameter fc2.weight, which this model has");
    let shallower = MlpConfig { num_layers: 0, ..SMALL };
    refused(shallower, "it has model.fc1.bias, which this run has no use for");
    let expected = "parameter fc0.weight has type F32 there, and f64 in this model";
    assert_eq!(difference(&path, SMALL, SGD, DType::F64), expected);
}

#[test]
fn another_optimizer_is_refused() {
    let expect = |saved_by, read_by, reason: &str| {
        let (_folder, path) = saved(saved_by);
        assert_eq!(difference(&path, SMALL, read_by, DType::F32), reason);
    };
    let lacks = "it lacks the optimizer state this run needs ";
    expect(PLAIN_SGD, SGD, &format!("{lacks}([\"velocity\"])"));
    expect(PLAIN_SGD, ADAMW, &format!("{lacks}([\"first_moment\", \"second_moment\"])"));
    let useless = |name| format!("it has optimizer.{name}.fc0.bias, which this run has no use for");
    expect(SGD, ADAMW, &useless("velocity"));
    expect(SGD, PLAIN_SGD, &useless("velocity"));
    expect(ADAMW, SGD, &useless("first_moment"));
}

#[test]
fn optimizer_state_of_another_shape_is_refused() {
    let (_folder, path) = saved(SGD);
    let mut bytes = fs::read(&path).unwrap();
    // The digest covers the contents, so it stays valid when a shape in the header changes.
    let before = b"\"optimizer.velocity.fc0.weight\":{\"dtype\":\"F32\",\"shape\":[4,3]";
    let at = bytes.windows(before.len()).position(|window| window == before).unwrap();
    bytes[at + before.len() - 5..at + before.len()].copy_from_slice(b"[3,4]");
    fs::write(&path, bytes).unwrap();
    assert_eq!(
        difference(&path, SMALL, SGD, DType::F32),
        "optimizer.velocity.fc0.weight has shape [3, 4] there, and [4, 3] in this model"
    );
}

#[test]
fn buffers_come_back_and_are_checked() {
    let build = |with_buffers: bool| {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit("bn0");
        unit.param("weight", [3], Init::Constant(1.0));
        if with_buffers {
            unit.buffer("running_mean", [3], 0.0);
            unit.buffer("running_var", [3], 1.0);
        }
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let layout = std::sync::Arc::new(layout.finish(1));
        let storage = Storage::private(layout, DType::F32, &compute.allocator).unwrap();
        storage.initialize(1).unwrap();
        let optimizer = Optimizer::new(SGD, &storage, &compute.allocator).unwrap();
        Trainee { compute, storage, optimizer }
    };
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("weights.safetensors");
    let first = build(true);
    let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let digest = first.storage.digest().unwrap();
    first.storage.buffers().write::<f32>().unwrap().copy_from_slice(&values);
    assert_eq!(first.storage.digest().unwrap(), digest, "the digest is of parameters");
    first.save(&path);
    let second = build(true);
    let restore = |to: &Trainee, path: &Path| {
        WeightFile::open(path).unwrap().restore(&to.storage, &to.optimizer)
    };
    restore(&second, &path).unwrap();
    assert_eq!(*second.storage.buffers().read::<f32>().unwrap(), values);
    assert_eq!(*second.storage.buffer(BufferId(1)).unwrap().read::<f32>().unwrap(), values[3..]);

    let refusal = |to: &Trainee, path: &Path| restore(to, path).unwrap_err().to_string();
    let error = refusal(&build(false), &path);
    assert!(
        error.ends_with("it has model.bn0.running_mean, which this run has no use for"),
        "{error}"
    );
    build(false).save(&path);
    let error = refusal(&build(true), &path);
    assert!(error.ends_with("it has no buffer bn0.running_mean, which this model has"), "{error}");
}

/// A file of a terabyte takes no room on the disk, and would take all memory. A FIFO without a writer would wait for ever.
#[test]
fn what_is_no_weight_file_is_refused_before_it_is_read() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("weights.safetensors");
    fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert!(refusal(&path).contains("is corrupt: its header is damaged"));
    let (_other, whole) = saved(SGD);
    fs::copy(whole, &path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    assert!(refusal(&path).contains("it is truncated or damaged"));
    fs::remove_file(&path).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    assert!(refusal(&path).contains("cannot be read: it is a FIFO, not a regular file"));
}
