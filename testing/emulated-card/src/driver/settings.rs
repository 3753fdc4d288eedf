//! The card's settings, from the environment.

use std::str::FromStr;

/// The card's settings. Each can be given as an environment variable.
#[derive(Clone, Debug)]
pub struct CardSettings {
    /// `PACELINE_EMULATED_CAPABILITY`: the compute capability, 9.0 by default.
    pub capability: (u32, u32),
    /// `PACELINE_EMULATED_UTILIZATION`: for how much of the time the card is busy, in percent, says NVML.
    pub utilization: u32,
    /// `PACELINE_EMULATED_NVML`: a function of NVML that fails, and with which status, such as `nvmlInit_v2:9`.
    pub nvml: Option<(String, u32)>,
    /// `PACELINE_EMULATED_CUPTI`: the same of CUPTI.
    pub cupti: Option<(String, u32)>,
    /// `PACELINE_EMULATED_SEED`: decides every order that CUDA leaves open.
    pub seed: u64,
    /// `PACELINE_EMULATED_MEMORY`: bytes of memory of each card.
    pub memory_bytes: usize,
    /// `PACELINE_EMULATED_CARDS`: how many cards there are.
    pub cards: usize,
    /// `PACELINE_EMULATED_VERSION`: the driver's version, 13000 for 13.0.
    pub version: i32,
    /// `PACELINE_EMULATED_STEPS`: more instructions in one launch are a timeout.
    pub steps: u64,
}

impl CardSettings {
    /// Reads the environment. A variable that cannot be read counts as not set.
    pub fn from_environment() -> Self {
        Self {
            capability: pair("PACELINE_EMULATED_CAPABILITY", '.').unwrap_or((9, 0)),
            utilization: number("PACELINE_EMULATED_UTILIZATION", 50),
            nvml: pair("PACELINE_EMULATED_NVML", ':'),
            cupti: pair("PACELINE_EMULATED_CUPTI", ':'),
            seed: number("PACELINE_EMULATED_SEED", 0),
            memory_bytes: number("PACELINE_EMULATED_MEMORY", 1 << 30),
            cards: number("PACELINE_EMULATED_CARDS", 1),
            version: number("PACELINE_EMULATED_VERSION", 13_000),
            steps: number("PACELINE_EMULATED_STEPS", 4_000_000_000),
        }
    }

    /// The most shared memory of a block ("CUDA C++ Programming Guide", table of technical specifications).
    pub fn shared_bytes(&self) -> usize {
        1024 * match self.capability {
            (7, 5) => 64,
            (7, _) => 96,
            (8, 6 | 9) | (12, _) => 99,
            (8, _) => 163,
            _ => 227,
        }
    }

    /// The newest version of PTX that a driver of this version takes.
    pub fn ptx_version(&self) -> (u32, u32) {
        let (major, minor) = (self.version / 1000, self.version % 1000 / 10);
        match major {
            12 => (8, [0, 1, 2, 3, 4, 5, 5, 6, 7, 8].get(minor as usize).copied().unwrap_or(8)),
            13.. => (9, minor as u32),
            _ => (7, 8),
        }
    }
}

fn pair<A: FromStr, B: FromStr>(name: &str, between: char) -> Option<(A, B)> {
    let text = std::env::var(name).ok()?;
    let (first, second) = text.trim().split_once(between)?;
    first.parse().ok().zip(second.parse().ok())
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}
