//! The published speeds of cards: peaks of products, by the precision that a kernel uses.
//!
//! The name of a device in a trace goes in. Dense peaks of the makers' data sheets come out, in FLOP per second. A card that is
//! not in the table is not judged.

/// A card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// Its name here.
    pub name: &'static str,
    /// FLOP per second of f32, without tensor cores.
    pub single: f64,
    /// FLOP per second of TF32, if the card has it.
    pub tf32: Option<f64>,
    /// FLOP per second of f16 or bf16 on tensor cores, if the card has them.
    pub half: Option<f64>,
}

const fn card(name: &'static str, single: f64, tf32: Option<f64>, half: Option<f64>) -> Card {
    Card { name, single, tf32, half }
}

/// The part of a device's name that tells a card, and the card. Longer names come before those that are part of them.
const CARDS: [(&str, Card); 15] = [
    ("H200", card("H200", 67e12, Some(494.7e12), Some(989.4e12))),
    ("H100 PCIe", card("H100 PCIe", 51e12, Some(378e12), Some(756e12))),
    ("H100", card("H100", 67e12, Some(494.7e12), Some(989.4e12))),
    ("A100", card("A100", 19.5e12, Some(156e12), Some(312e12))),
    ("A40", card("A40", 37.4e12, Some(74.8e12), Some(149.7e12))),
    ("A30", card("A30", 10.3e12, Some(82e12), Some(165e12))),
    ("A10G", card("A10G", 31.5e12, Some(35e12), Some(70e12))),
    ("A10", card("A10", 31.2e12, Some(62.5e12), Some(125e12))),
    ("L40S", card("L40S", 91.6e12, Some(183e12), Some(362e12))),
    ("L4", card("L4", 30.3e12, Some(60e12), Some(121e12))),
    ("V100-PCIE", card("V100 PCIe", 14e12, None, Some(112e12))),
    ("V100", card("V100", 15.7e12, None, Some(125e12))),
    ("T4", card("T4", 8.1e12, None, Some(65e12))),
    ("P100", card("P100", 10.6e12, None, None)),
    ("MI300X", card("MI300X", 163.4e12, Some(653.7e12), Some(1307.4e12))),
];

/// The card with this name of a device: `NVIDIA A100-SXM4-80GB`.
pub fn of(device: &str) -> Option<Card> {
    let has = |part: &str| {
        device.match_indices(part).any(|(at, _)| {
            let around =
                [device[..at].chars().next_back(), device[at + part.len()..].chars().next()];
            around.into_iter().flatten().all(|letter| !letter.is_ascii_alphanumeric())
        })
    };
    CARDS.iter().find(|(part, _)| has(part)).map(|(_, card)| *card)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_known_by_whole_words() {
        let name = |device| of(device).map(|card| card.name);
        assert_eq!(name("NVIDIA A100-SXM4-80GB"), Some("A100"));
        assert_eq!(name("Tesla V100-SXM2-32GB"), Some("V100"));
        assert_eq!(name("NVIDIA H100 80GB HBM3"), Some("H100"));
        assert_eq!(name("NVIDIA H100 PCIe"), Some("H100 PCIe"));
        assert_eq!(name("NVIDIA A1000"), None);
        assert_eq!(name("AMD Radeon Graphics"), None);
    }
}
