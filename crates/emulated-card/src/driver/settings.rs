//! What the environment says about the card.

use std::str::FromStr;

/// The card's settings. Each can be given as an environment variable.
#[derive(Clone, Debug)]
pub struct Settings {
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

impl Settings {
    /// Reads the environment. A variable that is not a number counts as not set.
    pub fn from_environment() -> Self {
        Self {
            seed: number("PACELINE_EMULATED_SEED", 0),
            memory_bytes: number("PACELINE_EMULATED_MEMORY", 1 << 30),
            cards: number("PACELINE_EMULATED_CARDS", 1),
            version: number("PACELINE_EMULATED_VERSION", 13_000),
            steps: number("PACELINE_EMULATED_STEPS", 4_000_000_000),
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

fn number<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}
