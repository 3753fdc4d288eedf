//! The cost of an operation on a wire: the model that emulates links and predicts times.
//!
//! Input: an operation, its message size, the number of ranks and a link. Output: steps, bytes and a time.
//! This module knows nothing of how a transport moves data.
//!
//! A rank sends `bytes` in `steps` steps. Each step waits for the one before. Over a link of latency
//! `a` and bandwidth `b` (in each direction at once) that takes `steps * a + bytes / b`. This is the
//! Hockney model, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
//! Operations in MPICH" (2005).
//!
//! Before an operation of `n` ranks moves data, every rank shows every other rank its call, as in the tcp
//! transport: one step, in which each rank sends and receives headers of `88 (n-1)` bytes. In an
//! all-to-all, the lengths of the blocks follow: one more step, of
//! `16 n (n-1)` bytes. The header of a point-to-point message travels with its data, so it costs 88 bytes
//! and no step. `S` is the message size: the longer of what a rank sends and what it receives. The totals:
//!
//! | operation | `steps` | `bytes` |
//! |---|---|---|
//! | all-reduce (direct), broadcast, reduce | 1 + 2 | `88 (n-1) + 2 (n-1)/n S` |
//! | all-reduce (ring) | 1 + `2 (n-1)` | `88 (n-1) + 2 (n-1)/n S` |
//! | reduce-scatter, all-gather, gather, scatter | 1 + 1 | `88 (n-1) + (n-1)/n S` |
//! | all-to-all | 2 + 1 | `(88 + 16 n) (n-1) + (n-1)/n S` |
//! | send, recv, send-recv | 1 | `88 + S` |
//! | barrier | 1 | `88 (n-1)` |
//!
//! An emulated link joins every two ranks, so its operations cost this much whatever transport is beneath.
//! [`Cost::between_hosts`] is what `hybrid` itself sends, where ranks of one host share memory.

use std::str::FromStr;
use std::time::Duration;

use paceline_memory::DType;
use paceline_numeric::tree;
use serde::{Deserialize, Serialize};

use crate::OpKind;
use crate::header::HEADER_BYTES;
use crate::hybrid::plan::is_slice_whole;

/// How an operation is carried out between processes that do not share memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Every rank exchanges data with all others at once and reduces its share as the tree over all ranks. It
    /// takes two steps and gives the same bits as shared memory.
    #[default]
    Direct,
    /// Neighbors pass on partial results in `2 (n-1)` steps. Each rank talks to only two others. Each share
    /// is summed in an order of its own, so floating-point sums differ from those of
    /// [`Algorithm::Direct`] in their last bits.
    Ring,
    /// The faster of the two: as measured for a few sizes when the group forms, or, on an emulated link, as
    /// computed by the cost model. The choice, and with it the last bits, may differ from run to run.
    Auto,
}

impl Algorithm {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Direct => "direct",
            Algorithm::Ring => "ring",
            Algorithm::Auto => "auto",
        }
    }

    /// The algorithm to use for a message of `bytes` bytes. For [`Algorithm::Auto`] the cost model decides, and never for the
    /// ring: both move the same bytes, and direct never has more steps. Only a measurement can tell how a network handles
    /// `n-1` streams into one rank.
    pub fn recommended(self, kind: OpKind, world: usize, bytes: u64, link: &Link) -> Algorithm {
        if kind != OpKind::AllReduce || world < 2 {
            return Algorithm::Direct;
        }
        let time = |algorithm| link.time(kind, algorithm, world, bytes);
        match self {
            Algorithm::Auto if time(Algorithm::Ring) < time(Algorithm::Direct) => Algorithm::Ring,
            Algorithm::Ring => Algorithm::Ring,
            _ => Algorithm::Direct,
        }
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Algorithm::Direct, Algorithm::Ring, Algorithm::Auto];
        let found = all.into_iter().find(|algorithm| algorithm.name() == text);
        found.ok_or_else(|| format!("there is no algorithm {text:?}; use direct, ring or auto"))
    }
}

/// The cost of an operation: steps, and the bytes that the busiest rank sends or receives, headers included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Messages that have to wait for each other.
    pub steps: u32,
    /// Bytes through the busiest rank, in its busier direction.
    pub bytes: u64,
}

impl Cost {
    /// The cost of an operation on a message of `bytes` bytes (the longer of what a rank sends and what it
    /// receives, as benchmarks count it), by the table at the top of `cost.rs`. Zero if `world` is 1.
    pub fn of(kind: OpKind, algorithm: Algorithm, world: usize, bytes: u64) -> Self {
        let others = world as u64 - 1;
        if others == 0 {
            return Self { steps: 0, bytes: 0 };
        }
        // Rounded up: the largest share counts.
        let share = (u128::from(bytes) * u128::from(others)).div_ceil(world as u128) as u64;
        let is_ring = algorithm == Algorithm::Ring;
        let header = HEADER_BYTES as u64;
        // Two counts for each rank.
        let cuts = 16 * world as u64;
        let (header_steps, header_bytes) = match kind {
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => (0, header),
            OpKind::AllToAll => (2, (header + cuts) * others),
            _ => (1, header * others),
        };
        let (steps, bytes) = match kind {
            OpKind::AllReduce if is_ring => (2 * others, 2 * share),
            // Scattered, then gathered, so that no rank sends the whole message to every other rank.
            OpKind::AllReduce | OpKind::Broadcast | OpKind::Reduce => (2, 2 * share),
            OpKind::ReduceScatter
            | OpKind::AllGather
            | OpKind::Gather
            | OpKind::Scatter
            | OpKind::AllToAll => (1, share),
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => (1, bytes),
            OpKind::Barrier => (0, 0),
        };
        Self { steps: (header_steps + steps) as u32, bytes: header_bytes.saturating_add(bytes) }
    }

    /// The cost of a reduction over `hybrid` between hosts, through the busiest rank in its busier direction.
    /// `None` if the operation does not reduce. Zero for a single host.
    ///
    /// Ranks of a rail show each other the calls of their hosts, `88 k` bytes for each other host. With
    /// `S/k` bytes for a rail of `h` hosts, a host then sends and receives `p (h-1)/h S/k` bytes of partial
    /// sums, and in an all-reduce or a reduce `(h-1)/h S/k` bytes of results. `p` is the largest number of
    /// nodes that a host has in the tree of the sum: 1 if `k` is a power of two. If one rank can own a slice in
    /// 512 KiB, it receives `p (h-1) S/k` bytes instead. 16-bit floats count as f32 in partial sums.
    pub fn between_hosts(
        kind: OpKind,
        hosts: usize,
        ranks_per_host: usize,
        bytes: u64,
        dtype: DType,
    ) -> Option<Self> {
        if !kind.reduces() {
            return None;
        }
        if hosts < 2 {
            return Some(Self { steps: 0, bytes: 0 });
        }
        let (world, local) = (hosts * ranks_per_host, ranks_per_host);
        let num_nodes = |host: usize| tree::nodes(world, host * local..(host + 1) * local).len();
        let num_nodes = (0..hosts).map(num_nodes).max().unwrap_or(1) as u64;
        let others = hosts as u64 - 1;
        let share = (u128::from(bytes) * u128::from(others)).div_ceil(world as u128) as u64;
        let is_wider = matches!(dtype, DType::F16 | DType::BF16);
        let width = 1 + u64::from(is_wider);
        let partial = share.saturating_mul(num_nodes).saturating_mul(width);
        let slice = bytes.div_ceil(local as u64);
        let is_whole =
            kind != OpKind::ReduceScatter && is_slice_whole(hosts, slice.saturating_mul(width));
        let (steps, results) = match kind {
            OpKind::ReduceScatter => (1, 0),
            _ => (2, share),
        };
        let header = (HEADER_BYTES * local) as u64 * others;
        // The owner of a whole slice sends the results in the other direction.
        let payload = if is_whole {
            num_nodes * width * slice * others
        } else {
            partial.saturating_add(results)
        };
        let bytes = header.saturating_add(payload);
        Some(Self { steps: 1 + steps, bytes })
    }
}

/// A link between ranks: the same between any two ranks, and full duplex.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes per second in each direction.
    pub bytes_per_s: f64,
    /// Seconds from sending a byte to receiving it.
    pub latency_s: f64,
}

/// Links with a name: (name, GB/s per direction, latency in microseconds, description), slowest first. Bandwidths are
/// nominal; latencies are those that well-tuned systems reach. `docs/prediction.md` has the sources.
pub const NAMED_LINKS: [(&str, f64, f64, &str); 16] = [
    ("1gbe", 0.125, 50.0, "Gigabit Ethernet"),
    ("10gbe", 1.25, 20.0, "10 Gbit/s Ethernet"),
    ("25gbe", 3.125, 10.0, "25 Gbit/s Ethernet"),
    ("40gbe", 5.0, 10.0, "40 Gbit/s Ethernet"),
    ("100gbe", 12.5, 5.0, "100 Gbit/s Ethernet"),
    ("edr", 12.5, 1.5, "InfiniBand EDR, 100 Gbit/s"),
    ("200gbe", 25.0, 4.0, "200 Gbit/s Ethernet"),
    ("hdr", 25.0, 1.5, "InfiniBand HDR, 200 Gbit/s"),
    ("pcie4", 32.0, 2.0, "PCI Express 4.0 x16"),
    ("400gbe", 50.0, 3.0, "400 Gbit/s Ethernet"),
    ("ndr", 50.0, 1.5, "InfiniBand NDR, 400 Gbit/s"),
    ("pcie5", 64.0, 2.0, "PCI Express 5.0 x16"),
    ("nvlink2", 150.0, 1.0, "NVLink 2, 6 links of a V100"),
    ("nvlink3", 300.0, 1.0, "NVLink 3, 12 links of an A100"),
    ("nvlink4", 450.0, 1.0, "NVLink 4, 18 links of an H100"),
    ("nvlink5", 900.0, 1.0, "NVLink 5, 18 links of a B200"),
];

/// How alike two names must be, from 0 to 1, for one to be suggested instead of the other.
const ALIKE: f64 = 0.8;

/// The name of the link that was probably meant.
fn nearest(typed: &str) -> Option<&'static str> {
    let typed = typed.trim().to_ascii_lowercase();
    let alike = |name: &&str| strsim::jaro_winkler(&typed, name);
    let names = NAMED_LINKS.iter().map(|(name, ..)| *name);
    // Of several that are equally alike, the fastest.
    let best = names.max_by(|a, b| alike(a).total_cmp(&alike(b)))?;
    (alike(&best) >= ALIKE).then_some(best)
}

impl Link {
    /// How long an operation takes on this link. [`Duration::MAX`] if the link carries nothing.
    pub fn time(&self, kind: OpKind, algorithm: Algorithm, world: usize, bytes: u64) -> Duration {
        let cost = Cost::of(kind, algorithm, world, bytes);
        if cost == (Cost { steps: 0, bytes: 0 }) {
            return Duration::ZERO;
        }
        let seconds = f64::from(cost.steps) * self.latency_s + cost.bytes as f64 / self.bytes_per_s;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Whether such a link can exist.
    pub fn is_possible(&self) -> bool {
        let Self { bytes_per_s, latency_s } = *self;
        bytes_per_s.is_finite() && bytes_per_s > 0.0 && latency_s.is_finite() && latency_s >= 0.0
    }
}

/// Parses a number followed by one of these units (case-insensitive). Returns the number and the unit's scale.
fn quantity(text: &str, units: &[(&str, f64)]) -> Option<(f64, f64)> {
    let split = text.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(split);
    let scale = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit.trim()))?.1;
    let number: f64 = number.trim().parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some((number, scale))
}

/// A time such as `5us` or `1.5 ms`, in seconds.
pub fn parse_seconds(text: &str) -> Option<f64> {
    const TIMES: [(&str, f64); 4] = [("ns", 1e9), ("us", 1e6), ("ms", 1e3), ("s", 1.0)];
    // Divided, since 1e6 is exact in floating point and 1e-6 is not.
    let (number, per_s) = quantity(text.trim(), &TIMES)?;
    Some(number / per_s)
}

impl FromStr for Link {
    type Err = String;

    /// A name (`10gbe`), or bandwidth and latency: `10gbit,50us`, `1.2GB/s,5us`.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((_, gb_per_s, latency_us, _)) =
            NAMED_LINKS.iter().find(|(name, ..)| name.eq_ignore_ascii_case(text))
        {
            return Ok(Self { bytes_per_s: gb_per_s * 1e9, latency_s: latency_us * 1e-6 });
        }
        const BANDWIDTHS: [(&str, f64); 7] = [
            ("kbit", 1e3 / 8.0),
            ("mbit", 1e6 / 8.0),
            ("gbit", 1e9 / 8.0),
            ("tbit", 1e12 / 8.0),
            ("kB/s", 1e3),
            ("MB/s", 1e6),
            ("GB/s", 1e9),
        ];
        let parsed = text.split_once(',').and_then(|(bandwidth, latency)| {
            let (number, bytes) = quantity(bandwidth.trim(), &BANDWIDTHS)?;
            let bytes_per_s = number * bytes;
            let latency_s = parse_seconds(latency)?;
            (bytes_per_s > 0.0).then_some(Self { bytes_per_s, latency_s })
        });
        parsed.ok_or_else(|| {
            if quantity(text.trim(), &BANDWIDTHS).is_some() {
                return format!("latency missing: {},50us", text.trim());
            }
            let names: Vec<&str> = NAMED_LINKS.iter().map(|(name, ..)| *name).collect();
            let meant = nearest(text).map(|name| format!("did you mean {name}? Use"));
            let use_words = meant.as_deref().unwrap_or("use");
            format!(
                "{text:?} does not name a link; {use_words} BANDWIDTH,LATENCY as in 10gbit,50us or 1.2GB/s,5us, or one \
                 of {}",
                names.join(", ")
            )
        })
    }
}

impl std::fmt::Display for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gbit = self.bytes_per_s * 8e-9;
        write!(f, "{gbit} Gbit/s, {:.1} us", self.latency_s * 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_a_name_or_two_numbers() {
        let link: Link = "10gbit,50us".parse().unwrap();
        assert_eq!(link, Link { bytes_per_s: 1.25e9, latency_s: 50e-6 });
        assert_eq!("10GbE".parse::<Link>().unwrap().bytes_per_s, 1.25e9);
        assert_eq!("1.5 GB/s, 2ms".parse::<Link>().unwrap().latency_s, 2e-3);
        let error = "10gbit".parse::<Link>().unwrap_err();
        assert_eq!(error, "latency missing: 10gbit,50us");
        for bad in ["", "0gbit,1us", "-1gbit,1us", "10gbit,50", "fast,1us", "1gbit,nanus"] {
            let error = bad.parse::<Link>().unwrap_err();
            assert!(error.contains("as in 10gbit,50us"), "{bad}: {error}");
        }
    }

    #[test]
    fn links_have_names_slowest_first_and_slips_are_answered() {
        assert!(NAMED_LINKS.is_sorted_by(|a, b| a.1 <= b.1));
        for (name, gb_per_s, latency_us, _) in NAMED_LINKS {
            let link: Link = name.parse().unwrap();
            assert!(link.is_possible() && link.bytes_per_s == gb_per_s * 1e9, "{name}");
            assert!((link.latency_s * 1e6 - latency_us).abs() < 1e-9, "{name}");
        }
        for (typed, meant) in
            [("100ge", "100gbe"), ("400g", "400gbe"), ("NVLink-4", "nvlink4"), ("hdr200", "hdr")]
        {
            let error = typed.parse::<Link>().unwrap_err();
            assert!(error.contains(&format!("did you mean {meant}?")), "{error}");
        }
        let error = "carrier pigeon".parse::<Link>().unwrap_err();
        assert!(!error.contains("did you mean"), "{error}");
    }

    #[test]
    fn an_all_reduce_of_two_ranks_moves_the_message_once() {
        let link: Link = "10gbit,50us".parse().unwrap();
        let time = |world, bytes| {
            link.time(OpKind::AllReduce, Algorithm::Direct, world, bytes).as_secs_f64()
        };
        // Three latencies, and 88 bytes to each other rank.
        assert!((time(2, 125_000_000) - (0.10015 + 88.0 / 1.25e9)).abs() < 1e-9);
        assert!((time(4, 125_000_000) - (0.15015 + 264.0 / 1.25e9)).abs() < 1e-9);
        assert_eq!(time(1, 125_000_000), 0.0);
        let ring = Cost::of(OpKind::AllReduce, Algorithm::Ring, 4, 100);
        assert_eq!(ring, Cost { steps: 7, bytes: 264 + 150 });
    }

    #[test]
    fn every_operation_exchanges_headers() {
        let cost = |kind| Cost::of(kind, Algorithm::Direct, 4, 1000);
        let cases = [
            (OpKind::AllReduce, 3, 264 + 1500),
            (OpKind::Broadcast, 3, 264 + 1500),
            (OpKind::Reduce, 3, 264 + 1500),
            (OpKind::ReduceScatter, 2, 264 + 750),
            (OpKind::AllGather, 2, 264 + 750),
            (OpKind::Gather, 2, 264 + 750),
            (OpKind::Scatter, 2, 264 + 750),
            (OpKind::AllToAll, 3, 264 + 192 + 750),
            (OpKind::Send, 1, 1088),
            (OpKind::Recv, 1, 1088),
            (OpKind::SendRecv, 1, 1088),
            (OpKind::Barrier, 1, 264),
        ];
        for (kind, steps, bytes) in cases {
            assert_eq!(cost(kind), Cost { steps, bytes }, "{kind:?}");
            let alone = Cost::of(kind, Algorithm::Direct, 1, 1000);
            assert_eq!(alone, Cost { steps: 0, bytes: 0 }, "{kind:?}");
        }
    }

    #[test]
    fn a_link_that_cannot_be_takes_for_ever() {
        let link = |bytes_per_s, latency_s| Link { bytes_per_s, latency_s };
        assert!(link(1e-3, 0.0).is_possible());
        let nonsense = [link(0.0, 1e-6), link(-1.0, 0.0), link(f64::NAN, 0.0), link(1e9, -9.0)];
        for link in nonsense {
            assert!(!link.is_possible(), "{link:?}");
            let time = |world| link.time(OpKind::AllReduce, Algorithm::Direct, world, 1000);
            assert_eq!((time(2), time(1)), (Duration::MAX, Duration::ZERO), "{link:?}");
        }
    }

    #[test]
    fn a_ring_is_never_recommended_but_kept_when_asked_for() {
        let link: Link = "10gbe".parse().unwrap();
        for bytes in [0, 1000, 1 << 30] {
            let of = |asked: Algorithm, kind| asked.recommended(kind, 8, bytes, &link);
            assert_eq!(of(Algorithm::Auto, OpKind::AllReduce), Algorithm::Direct);
            assert_eq!(of(Algorithm::Ring, OpKind::AllReduce), Algorithm::Ring);
            assert_eq!(of(Algorithm::Ring, OpKind::Broadcast), Algorithm::Direct);
        }
    }
}
