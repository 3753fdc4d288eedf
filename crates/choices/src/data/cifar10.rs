//! `--data cifar10`: CIFAR-10 in its binary version.

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_data::Cifar10;
use paceline_failure::Result;
use paceline_hub::download::{Item, Source};

use super::files::{FileFlags, Files};
use super::{DataChoice, DataSettings, RunNeeds};
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
pub(super) struct Cifar10Files;

impl Choice for Cifar10Files {
    fn name(&self) -> &'static str {
        "cifar10"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["cifar-10"]
    }

    fn about(&self) -> &'static str {
        "Binary batches in --data-dir"
    }

    fn flags(&self) -> Vec<Arg> {
        flags_of::<FileFlags>()
    }
}

impl DataChoice for Cifar10Files {
    fn resolve(&self, settings: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
        let files = Files {
            name: self.name(),
            flags: read(settings)?,
            source: &SOURCE,
            open: |folder, split| Ok(Arc::new(Cifar10::load(folder, split)?)),
        };
        files.check(run)
    }

    fn source(&self) -> Option<&'static Source> {
        Some(&SOURCE)
    }
}
