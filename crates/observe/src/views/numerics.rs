//! `numerics.bin`: digests of the gradients and weights of each step, written and read.
//!
//! The first line is a JSON object with the names of the parameters. A record follows for each step, of numbers of 8 bytes, little-endian:
//! the step, and for each parameter the digest of its gradient and that of its updated value.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use paceline_failure::Result;
use paceline_host::disk::Disk;
use serde::{Deserialize, Serialize};

use crate::figures::event::{Event, Listener};
use crate::record::rank_report::RankReport;
use crate::views::appended::Appended;

/// Its name in a run folder.
pub const FILE_NAME: &str = "numerics.bin";

/// No first line is longer: the parameters of the largest models take 1 MB.
const MAX_HEAD_BYTES: u64 = 16_000_000;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
struct NumericsHead {
    /// The version of the format.
    numerics: u32,
    names: Vec<String>,
}

/// Writes the file.
#[derive(Debug)]
pub struct NumericsFile {
    disk: Disk,
    path: PathBuf,
    /// Once the model is known: the parameters that are trained, by number, and the file.
    open: Option<(Vec<usize>, Appended)>,
}

impl NumericsFile {
    /// Writes into a run folder.
    pub fn new(disk: &Disk, folder: &Path) -> Self {
        Self { disk: disk.clone(), path: folder.join(FILE_NAME), open: None }
    }
}

impl Listener for NumericsFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Built(model) => {
                let (params, names) = model
                    .layout
                    .trained()
                    .map(|(id, param)| (id.0, param.label().into_owned()))
                    .unzip();
                let head = NumericsHead { numerics: 1, names };
                let head = serde_json::to_string(&head).expect("plain data") + "\n";
                let file = Appended::create(&self.disk, self.path.clone(), head.as_bytes())?;
                self.open = Some((params, file));
            }
            Event::Step(step) => {
                let (Some((params, file)), Some(digests)) = (&mut self.open, step.digests) else {
                    return Ok(());
                };
                let of_params = params.iter().flat_map(|at| digests[*at]);
                let record = std::iter::once(step.steps).chain(of_params);
                let record: Vec<u8> = record.flat_map(u64::to_le_bytes).collect();
                file.add(&record, "the rest of");
            }
            _ => {}
        }
        Ok(())
    }

    fn add_to(&self, report: &mut RankReport) {
        report.missing_files.extend(self.open.iter().filter_map(|(_, file)| file.missing.clone()));
    }
}

/// The steps of a file, in order.
#[derive(Debug)]
pub struct NumericsReader {
    /// The parameters.
    pub names: Vec<String>,
    file: BufReader<std::fs::File>,
}

impl NumericsReader {
    /// Opens the file of a run folder.
    ///
    /// # Errors
    /// If it cannot be read, or is no such file.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let mut file = BufReader::new(paceline_files::open(&folder.join(FILE_NAME))?);
        let mut line = Vec::new();
        file.by_ref().take(MAX_HEAD_BYTES).read_until(b'\n', &mut line)?;
        let head: Option<NumericsHead> = serde_json::from_slice(&line).ok();
        let Some(NumericsHead { names, .. }) = head.filter(|head| head.numerics == 1) else {
            let problem = "its first line has no names of parameters that this version can read";
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        };
        Ok(Self { names, file })
    }

    /// The next step and its digests, by the order of the names; `None` after the last whole one.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn next_step(&mut self) -> io::Result<Option<(u64, Vec<[u64; 2]>)>> {
        let mut bytes = vec![0; 8 * (1 + 2 * self.names.len())];
        match self.file.read_exact(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let (numbers, _) = bytes.as_chunks::<8>();
        let digests = numbers[1..].as_chunks::<2>().0.iter();
        let step = u64::from_le_bytes(numbers[0]);
        Ok(Some((step, digests.map(|of| of.map(u64::from_le_bytes)).collect())))
    }
}
