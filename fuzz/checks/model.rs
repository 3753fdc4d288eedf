//! Checks that arbitrary bytes in a weight file do no harm.
//!
//! Input: bytes. Output: nothing if they are the weights of a small model, otherwise the message of the error. A panic is a
//! bug of the reader. `paceline-model` includes this file with its feature `fuzzing`.

use std::path::Path;
use std::sync::Arc;

use paceline_kernels::optimizer::{AdamW, Sgd};
use paceline_memory::{Allocator, DType};
use safetensors::tensor::Metadata;

use crate::pretrained::infos;
use crate::weights::{self, DIGEST_KEY, WeightFile, digest, parse};
use crate::{
    Init, Layout, LayoutBuilder, LlamaConfig, ModelError, Optimizer, OptimizerConfig, Storage,
};

const SGD: OptimizerConfig =
    OptimizerConfig::Sgd(Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 });
/// The optimizer of the kept checkpoints.
pub const ADAM_W: OptimizerConfig = OptimizerConfig::AdamW(AdamW {
    lr: 0.1,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.0,
});

/// Reads the bytes as they are, and once more with the right digest. With a wrong digest, the reader refuses the file
/// before it reads anything else.
pub fn safetensors(bytes: &[u8]) -> Result<(), String> {
    let outcome = read(bytes);
    // The reader of published weights looks at headers only.
    let header_len = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
    let end = usize::try_from(header_len).ok().and_then(|len| len.checked_add(8));
    if let Some(header) = end.and_then(|end| bytes.get(8..end)) {
        for (name, begin, info) in infos(header, bytes.len() as u64).unwrap_or_default() {
            assert!(begin <= bytes.len() as u64, "{name} begins behind the end: {info:?}");
        }
    }
    if let Some(signed) = signed(bytes) {
        let again = read(&signed);
        assert!(outcome.is_err() || again == Ok(()), "{again:?} with the digest that it has");
    }
    outcome
}

/// The same file with the right digest, if the bytes are a weight file. The tensors stay the same.
pub fn signed(bytes: &[u8]) -> Option<Vec<u8>> {
    let (header, tensors) = parse(bytes).ok()?;
    let data = &bytes[bytes.len() - header.data_len()..];
    let mut by_name: Vec<_> = tensors.iter().collect();
    by_name.sort_unstable_by_key(|(name, _)| *name);
    let mut metadata = header.metadata().clone().unwrap_or_default();
    let sorted = metadata.clone().into_iter().collect();
    let digest = digest(&sorted, by_name.iter().map(|(name, tensor)| (*name, tensor.data())));
    metadata.insert(DIGEST_KEY.into(), digest);
    let infos = header.offset_keys().into_iter().map(|name| {
        let info = header.info(&name).expect("a tensor of the file").clone();
        (name, info)
    });
    let header = Metadata::new(Some(metadata), infos.collect()).expect("the same tensors");
    let header = serde_json::to_vec(&header).expect("a header is plain data");
    let len = (header.len() as u64).to_le_bytes();
    Some([&len, header.as_slice(), data].concat())
}

/// Reads the bytes as a `config.json`. What is accepted is the same when it is written again, and a model of it can be laid
/// out.
pub fn config_json(bytes: &[u8]) -> Result<(), String> {
    let text = str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let config = LlamaConfig::from_json(text).map_err(sentence)?;
    let written = config.to_json().to_string();
    assert_eq!(LlamaConfig::from_json(&written).as_ref().ok(), Some(&config), "{written}");
    // As if weights were compared with it. A layer more only takes longer.
    let few = LlamaConfig { num_hidden_layers: config.num_hidden_layers.min(2), ..config };
    let model = few.build(3).map_err(sentence)?;
    assert!(model.layout.num_bytes(DType::F64) >= 8 * model.layout.num_params());
    Ok(())
}

fn sentence(error: ModelError) -> String {
    let message = error.to_string();
    assert!(message.contains(' '), "a message is a sentence: {message}");
    message
}

/// A model whose file has at most 2 KiB.
pub fn small_layout() -> Layout {
    let mut builder = LayoutBuilder::new();
    let mut unit = builder.unit("fc0");
    unit.param("weight", [2, 3], Init::Constant(0.5));
    unit.param("bias", [2], Init::Constant(0.0));
    unit.buffer("mean", [2], 0.0);
    builder.finish(1)
}

fn read(bytes: &[u8]) -> Result<(), String> {
    let path = Path::new("file");
    let file = WeightFile::from_bytes(path, bytes.to_vec()).map_err(sentence)?;
    let layout = Arc::new(small_layout());
    let allocator = Allocator::new();
    let storage = Storage::private(layout.clone(), DType::F32, &allocator).expect("a small model");
    storage.initialize(7).expect("nobody else uses the memory");
    let fits_model = file.check_model(&layout, DType::F32).map_err(sentence);
    assert_eq!(file.restore_model(&storage).map_err(sentence), fits_model);
    // A file without the state of an optimizer is good enough to evaluate, but not to go on.
    let mut outcome = fits_model;
    for config in [SGD, ADAM_W] {
        let optimizer = Optimizer::new(config, &storage, &allocator).expect("a small model");
        let fits = file.check(&layout, DType::F32, &config).map_err(sentence);
        assert_eq!(file.restore(&storage, &optimizer).map_err(sentence), fits);
        if let Err(message) = fits {
            outcome = outcome.and(Err(message));
            continue;
        }
        // The metadata of the file includes its digest, which is not written twice.
        let mut again = Vec::new();
        let written = weights::write(&mut again, &storage, &optimizer, file.metadata());
        written.expect("memory takes every write");
        let again = WeightFile::from_bytes(path, again).expect("what was written can be read");
        assert_eq!(again.digest(), file.digest());
        assert_eq!(again.metadata(), file.metadata());
        return Ok(());
    }
    outcome
}
