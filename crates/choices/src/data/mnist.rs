//! `--data mnist`: MNIST, and any other data set in its files' format (Fashion-MNIST, KMNIST).

use std::sync::Arc;

use clap::{Arg, ArgMatches};
use paceline_data::Mnist;
use paceline_failure::Result;
use paceline_hub::download::{Item, Source};

use super::files::{FileFlags, Files};
use super::{DataChoice, DataSettings, RunNeeds};
use crate::registry::{Choice, flags_of, read};

/// The files as they are published.
static SOURCE: Source = Source {
    address: "https://ossci-datasets.s3.amazonaws.com/mnist",
    subfolder: "MNIST/raw",
    items: &[
        Item {
            name: "train-images-idx3-ubyte.gz",
            md5: "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            max_bytes: 10_000_000,
            members: &[],
        },
        Item {
            name: "train-labels-idx1-ubyte.gz",
            md5: "d53e105ee54ea40749a09fcbcd1e9432",
            max_bytes: 30_000,
            members: &[],
        },
        Item {
            name: "t10k-images-idx3-ubyte.gz",
            md5: "9fb629c4189551a2d022fa330f9573f3",
            max_bytes: 1_700_000,
            members: &[],
        },
        Item {
            name: "t10k-labels-idx1-ubyte.gz",
            md5: "ec29112dd5afa0611ce80d1b7f02629c",
            max_bytes: 5_000,
            members: &[],
        },
    ],
};

/// The choice.
pub(super) struct MnistFiles;

impl Choice for MnistFiles {
    fn name(&self) -> &'static str {
        "mnist"
    }

    fn about(&self) -> &'static str {
        "IDX files, plain or gzip, in --data-dir"
    }

    fn flags(&self) -> Vec<Arg> {
        flags_of::<FileFlags>()
    }
}

impl DataChoice for MnistFiles {
    fn resolve(&self, settings: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
        let files = Files {
            name: self.name(),
            flags: read(settings)?,
            source: &SOURCE,
            open: |folder, split| Ok(Arc::new(Mnist::load(folder, split)?)),
        };
        files.check(run)
    }

    fn source(&self) -> Option<&'static Source> {
        Some(&SOURCE)
    }
}
