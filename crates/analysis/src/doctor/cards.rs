//! The published speeds of cards: peaks of products, by the precision that a kernel uses, and the speed and size of memory.
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
    /// Bytes per second of its memory.
    pub bytes_per_s: f64,
    /// Bytes of its memory, where a GB is 1e9 bytes.
    pub memory_bytes: f64,
}

const fn card(
    name: &'static str,
    single: f64,
    tf32: Option<f64>,
    half: Option<f64>,
    bytes_per_s: f64,
    memory_bytes: f64,
) -> Card {
    Card { name, single, tf32, half, bytes_per_s, memory_bytes }
}

/// The part of a device's name that tells a card, and the card. Longer names come before those that are part of them. Cards for players
/// multiply f16 at half speed where sums are f32, as PyTorch's are. A device of an MI250 is one half of the card.
/// Where cards of one name have several memories, the fastest and largest counts.
#[rustfmt::skip]
const CARDS: [(&str, Card); 44] = [
    ("GB300", card("GB300", 83e12, Some(1250e12), Some(2500e12), 8e12, 288e9)),
    ("B300", card("B300", 75e12, Some(1125e12), Some(2250e12), 8e12, 288e9)),
    ("GB200", card("GB200", 80e12, Some(1250e12), Some(2500e12), 8e12, 186e9)),
    ("B200", card("B200", 75e12, Some(1125e12), Some(2250e12), 8e12, 180e9)),
    ("GH200", card("GH200", 67e12, Some(494.7e12), Some(989.4e12), 4e12, 96e9)),
    ("H200", card("H200", 67e12, Some(494.7e12), Some(989.4e12), 4.8e12, 141e9)),
    ("H100 PCIe", card("H100 PCIe", 51e12, Some(378e12), Some(756e12), 2e12, 80e9)),
    ("H100", card("H100", 67e12, Some(494.7e12), Some(989.4e12), 3.35e12, 80e9)),
    ("H800 PCIe", card("H800 PCIe", 51e12, Some(378e12), Some(756e12), 2e12, 80e9)),
    ("H800", card("H800", 67e12, Some(494.7e12), Some(989.4e12), 3.35e12, 80e9)),
    ("H20", card("H20", 44e12, Some(74e12), Some(148e12), 4e12, 96e9)),
    ("A100", card("A100", 19.5e12, Some(156e12), Some(312e12), 2.039e12, 80e9)),
    ("A800", card("A800", 19.5e12, Some(156e12), Some(312e12), 2.039e12, 80e9)),
    // An A100 before it got its name.
    ("PG509-210", card("A100", 19.5e12, Some(156e12), Some(312e12), 1.555e12, 40e9)),
    ("A40", card("A40", 37.4e12, Some(74.8e12), Some(149.7e12), 0.696e12, 48e9)),
    ("A30", card("A30", 10.3e12, Some(82e12), Some(165e12), 0.933e12, 24e9)),
    ("A10G", card("A10G", 31.5e12, Some(35e12), Some(70e12), 0.6e12, 24e9)),
    ("A10", card("A10", 31.2e12, Some(62.5e12), Some(125e12), 0.6e12, 24e9)),
    ("L40S", card("L40S", 91.6e12, Some(183e12), Some(362e12), 0.864e12, 48e9)),
    ("L40", card("L40", 90.5e12, Some(90.5e12), Some(181e12), 0.864e12, 48e9)),
    ("L20", card("L20", 59.8e12, Some(59.8e12), Some(119.5e12), 0.864e12, 48e9)),
    ("L4", card("L4", 30.3e12, Some(60e12), Some(121e12), 0.3e12, 24e9)),
    ("RTX A6000", card("RTX A6000", 38.7e12, Some(77.4e12), Some(154.8e12), 0.768e12, 48e9)),
    ("RTX 6000 Ada", card("RTX 6000 Ada", 91.1e12, Some(182.1e12), Some(364.2e12), 0.96e12, 48e9)),
    ("RTX 5090", card("RTX 5090", 104.8e12, Some(104.8e12), Some(209.5e12), 1.792e12, 32e9)),
    ("RTX 4090", card("RTX 4090", 82.6e12, Some(82.6e12), Some(165.2e12), 1.008e12, 24e9)),
    ("RTX 3090", card("RTX 3090", 35.6e12, Some(35.6e12), Some(71e12), 0.936e12, 24e9)),
    ("RTX 2080 Ti", card("RTX 2080 Ti", 13.4e12, None, Some(53.8e12), 0.616e12, 11e9)),
    ("Quadro RTX 8000", card("Quadro RTX 8000", 16.3e12, None, Some(130.5e12), 0.672e12, 48e9)),
    ("Quadro RTX 6000", card("Quadro RTX 6000", 16.3e12, None, Some(130.5e12), 0.672e12, 24e9)),
    ("TITAN RTX", card("TITAN RTX", 16.3e12, None, Some(130.5e12), 0.672e12, 24e9)),
    ("V100-PCIE", card("V100 PCIe", 14e12, None, Some(112e12), 0.9e12, 32e9)),
    ("V100", card("V100", 15.7e12, None, Some(125e12), 0.9e12, 32e9)),
    ("T4", card("T4", 8.1e12, None, Some(65e12), 0.32e12, 16e9)),
    ("P100", card("P100", 10.6e12, None, None, 0.732e12, 16e9)),
    ("MI355X", card("MI355X", 157.3e12, None, Some(2516.6e12), 8e12, 288e9)),
    ("MI350X", card("MI350X", 144.2e12, None, Some(2306.9e12), 8e12, 288e9)),
    ("MI325X", card("MI325X", 163.4e12, Some(653.7e12), Some(1307.4e12), 6e12, 256e9)),
    ("MI300X", card("MI300X", 163.4e12, Some(653.7e12), Some(1307.4e12), 5.3e12, 192e9)),
    ("MI300A", card("MI300A", 122.6e12, Some(490.3e12), Some(980.6e12), 5.3e12, 128e9)),
    ("MI250X", card("MI250X", 23.9e12, None, Some(191.5e12), 1.638e12, 64e9)),
    ("MI250", card("MI250", 22.6e12, None, Some(181e12), 1.638e12, 64e9)),
    ("MI210", card("MI210", 22.6e12, None, Some(181e12), 1.638e12, 64e9)),
    ("MI100", card("MI100", 23.1e12, None, Some(184.6e12), 1.229e12, 32e9)),
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

/// The card that a user names, in any case, or else the names of all.
pub fn named(name: &str) -> Result<Card, String> {
    let found = CARDS.iter().find(|(_, card)| card.name.eq_ignore_ascii_case(name));
    found.map(|(_, card)| *card).ok_or_else(|| {
        let own = CARDS.iter().filter(|(part, card)| *part == card.name);
        own.map(|(_, card)| card.name).collect::<Vec<_>>().join(", ")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Speeds;

    #[test]
    fn cards_are_known_by_whole_words() {
        let name = |device| of(device).map(|card| card.name);
        assert_eq!(name("NVIDIA A100-SXM4-80GB"), Some("A100"));
        assert_eq!(name("Tesla V100-SXM2-32GB"), Some("V100"));
        assert_eq!(name("NVIDIA H100 80GB HBM3"), Some("H100"));
        assert_eq!(name("NVIDIA H100 PCIe"), Some("H100 PCIe"));
        for device in [
            "AMD Instinct MI210",
            "AMD Instinct MI250X",
            "AMD Instinct MI300X VF",
            "AMD Instinct MI325X",
            "AMD Instinct MI355X",
            "NVIDIA A800-SXM4-80GB",
            "NVIDIA B200",
            "NVIDIA GB200",
            "NVIDIA GH200 480GB",
            "NVIDIA GeForce RTX 2080 Ti",
            "NVIDIA GeForce RTX 4090",
            "NVIDIA H20",
            "NVIDIA H800",
            "NVIDIA RTX A6000",
        ] {
            let card = of(device).expect(device);
            assert!(device.contains(card.name) && card.half > Some(card.single), "{device}");
        }
        assert_eq!(name("NVIDIA PG509-210"), Some("A100"));
        let peak = |of| Speeds::of_card("NVIDIA H200", of).map(|of| of.flop_per_s);
        assert_eq!(
            ["f32", "tf32", "bf16"].map(peak),
            [Some(67e12), Some(494.7e12), Some(989.4e12)]
        );
        assert_eq!(Speeds::of_card("Tesla T4", "tf32"), None);
        assert_eq!(name("NVIDIA A1000"), None);
        assert_eq!(name("AMD Radeon Graphics"), None);
    }
}
