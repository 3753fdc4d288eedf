//! `--data mnist`: MNIST, and any other data set in its files' format (Fashion-MNIST, KMNIST).

use std::sync::Arc;

use paceline_data::Mnist;
use paceline_hub::published::{Item, Source};

use super::OfData;
use super::files::{FileFlags, Files, Open};
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
pub(super) const MNIST: Choice<OfData> = Choice {
    name: "mnist",
    aliases: &[],
    about: "IDX files, plain or gzip, in --data-dir",
    flags: flags_of::<FileFlags>,
    of: OfData {
        source: Some(&SOURCE),
        ..OfData::read_by(|settings, run| {
            let open: Open = |folder, split| Ok(Arc::new(Mnist::load(folder, split)?));
            Files { name: MNIST.name, flags: read(settings)?, source: &SOURCE, open }.check(run)
        })
    },
};
