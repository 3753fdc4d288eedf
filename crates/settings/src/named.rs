//! The values that flags of every run can name: transports (of `paceline-launch`), devices, element types, orders of accumulation, learning rate
//! schedules.
//!
//! This file does not know what they mean.

use std::ffi::OsStr;

use clap::ValueEnum;
use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use paceline_files::Printable;
pub use paceline_launch::TransportName;
use paceline_model::Precision;
use paceline_strategies::AccumulationOrder;
use serde::Serialize;

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The processor
    Cpu,
}

/// Reads a [`Device`]. Names of accelerators are answered with what there is.
#[derive(Clone, Copy, Debug)]
pub struct DeviceParser;

/// How the names of devices begin that other programs have.
const ACCELERATORS: [(&str, &str); 6] = [
    ("cuda", "CUDA"),
    ("gpu", "GPUs"),
    ("rocm", "ROCm"),
    ("hip", "ROCm"),
    ("mps", "Metal"),
    ("xpu", "XPUs"),
];

impl TypedValueParser for DeviceParser {
    type Value = Device;

    fn parse_ref(
        &self,
        command: &clap::Command,
        flag: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Device, clap::Error> {
        let name = value.to_string_lossy().to_ascii_lowercase();
        if let Some((_, what)) = ACCELERATORS.iter().find(|(begin, _)| name.starts_with(begin)) {
            let problem = format!(
                "--device {}: this build computes on the processor only, and has no code for {what}; leave \
                 --device out, or pass cpu\n",
                value.printable()
            );
            return Err(clap::Error::raw(ErrorKind::ValueValidation, problem));
        }
        EnumValueParser::<Device>::new().parse_ref(command, flag, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Device::value_variants().iter().filter_map(ValueEnum::to_possible_value)))
    }
}

/// In which element type products are computed. Parameters, their gradients and the optimizer's state are f32 in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrecisionName {
    /// Single precision everywhere
    F32,
    /// The operands of products in 16 bits; weights, gradients of weights, sums and losses in single precision
    Bf16,
}

impl PrecisionName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PrecisionName::F32 => "f32",
            PrecisionName::Bf16 => "bf16",
        }
    }
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Self {
        match name {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Bf16 => Precision::BF16,
        }
    }
}

/// The order in which a rank adds up the gradients of its micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AccumulationName {
    /// One after the other, without further memory
    Sequential,
    /// As ranks are added up, so that N ranks and N times --accumulate give the same bits
    Tree,
}

impl From<AccumulationName> for AccumulationOrder {
    fn from(name: AccumulationName) -> Self {
        match name {
            AccumulationName::Sequential => AccumulationOrder::Sequential,
            AccumulationName::Tree => AccumulationOrder::Tree,
        }
    }
}

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Course {
    /// No change
    Constant,
    /// Down to --min-lr on a straight line
    Linear,
    /// Down to --min-lr on half a cosine
    Cosine,
}

impl Course {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Course::Constant => "constant",
            Course::Linear => "linear",
            Course::Cosine => "cosine",
        }
    }
}
