//! The values that flags of every run can name: transports and devices (both of `paceline-launch`),
//! element types, orders of accumulation, learning rate schedules.
//!
//! This file does not know their meaning.

use clap::ValueEnum;
pub use paceline_launch::TransportName;
use paceline_model::Precision;
use paceline_strategies::AccumulationOrder;
use serde::Serialize;

/// In which element type products are computed. Parameters, their gradients and the optimizer's state are f32 in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrecisionName {
    /// Single precision everywhere
    #[value(aliases = ["fp32", "float32"])]
    F32,
    /// The operands of products in 16 bits; weights, gradients of weights, sums and losses in single precision
    #[value(alias = "bfloat16")]
    Bf16,
    /// As bf16, with fp16, whose range is smaller: the loss is scaled (see --loss-scale). A processor emulates it
    #[value(alias = "float16")]
    Fp16,
}

/// Mixed precision as PyTorch users name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AmpName {
    /// --precision bf16
    #[value(alias = "true")]
    Bf16,
    /// --precision fp16
    Fp16,
    /// --precision f32
    #[value(alias = "false")]
    Off,
}

impl PrecisionName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PrecisionName::F32 => "f32",
            PrecisionName::Bf16 => "bf16",
            PrecisionName::Fp16 => "fp16",
        }
    }

    /// The addition to the first line of a run. `on_card` says whether it computes there; a processor emulates fp16.
    pub fn in_title(self, on_card: bool) -> &'static str {
        match self {
            PrecisionName::F32 => "",
            PrecisionName::Bf16 => ", in bf16",
            PrecisionName::Fp16 if on_card => ", in fp16",
            PrecisionName::Fp16 => ", in fp16 (emulated)",
        }
    }
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Self {
        match name {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Bf16 => Precision::BF16,
            PrecisionName::Fp16 => Precision::FP16,
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
