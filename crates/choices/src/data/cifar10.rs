//! `--data cifar10`: CIFAR-10 in its binary version.

use std::sync::Arc;

use paceline_data::Cifar10;
use paceline_hub::published::{Item, Source};

use super::OfData;
use super::files::{FileFlags, Files, Open};
use crate::registry::{Choice, flags_of, read};

/// The files as they are published.
static SOURCE: Source = Source {
    address: "https://www.cs.toronto.edu/~kriz",
    subfolder: "cifar-10-batches-bin",
    items: &[Item {
        name: "cifar-10-binary.tar.gz",
        md5: "c32a1d4ab5d03f1284b67883e8d87530",
        max_bytes: 171_000_000,
        members: &[
            "data_batch_1.bin",
            "data_batch_2.bin",
            "data_batch_3.bin",
            "data_batch_4.bin",
            "data_batch_5.bin",
            "test_batch.bin",
        ],
    }],
};

/// The choice.
pub(super) const CIFAR10: Choice<OfData> = Choice {
    name: "cifar10",
    aliases: &["cifar-10"],
    about: "Binary batches in --data-dir",
    flags: flags_of::<FileFlags>,
    of: OfData {
        source: Some(&SOURCE),
        ..OfData::read_by(|settings, run| {
            let open: Open = |folder, split| Ok(Arc::new(Cifar10::load(folder, split)?));
            Files { name: CIFAR10.name, flags: read(settings)?, source: &SOURCE, open }.check(run)
        })
    },
};
