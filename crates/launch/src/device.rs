//! Where ranks compute: the values of `--device`.
//!
//! A [`Device`] is read and written as a name with settings, such as `sim:copy=16gbit,10us,launch=5us`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use paceline_collectives::{Link, parse_seconds};
use paceline_cuda::Card;
use paceline_failure::usage;
use paceline_memory::{Accelerator, Allocator, MemoryError, SimSpec};
use serde::{Serialize, Serializer};

use crate::TransportName;

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// An accelerator that is emulated on the processor.
    Sim(SimSpec),
    /// A card of NVIDIA: this one, or one for each rank of a host while there are enough.
    Cuda(Option<usize>),
}

impl Device {
    /// The memory of rank `local_rank` of a host: `of_host` on the processor. Errors if the system refuses a thread, or the
    /// driver the card.
    pub fn memory(self, of_host: Allocator, local_rank: usize) -> Result<Allocator, MemoryError> {
        let accelerator = match self {
            Device::Cpu => return Ok(of_host),
            Device::Sim(spec) => Accelerator::sim(spec),
            Device::Cuda(index) => Accelerator::cuda(Card::open(card_of(index, local_rank)?)?),
        };
        Ok(Allocator::on(&accelerator.stream("compute")?))
    }

    /// Whether it is emulated on the processor.
    pub fn is_emulated(self) -> bool {
        match self {
            Device::Cpu => false,
            Device::Sim(_) => true,
            Device::Cuda(index) => Card::open(index.unwrap_or_default())
                .is_ok_and(|card| card.name() == paceline_cuda::card::EMULATED),
        }
    }

    /// Whether synthetic data is made there, not copied from the host.
    pub fn makes_data(self) -> bool {
        matches!(self, Device::Sim(_))
    }

    /// A line about where a rank computes, the rank `local_rank` of its host.
    pub fn place(self, rank: usize, local_rank: usize) -> String {
        let devices = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or("<not set>".into());
        let card = |index| Card::open(card_of(index, local_rank)?);
        let place = match self {
            Device::Cpu | Device::Sim(_) => format!("device={self}"),
            Device::Cuda(index) => match card(index) {
                Ok(card) => format!("current_device=cuda:{}, name={}", card.index(), card.name()),
                Err(error) => format!("device={self}: {error}"),
            },
        };
        format!("[Rank {rank}] CUDA_VISIBLE_DEVICES={devices}, LOCAL_RANK={local_rank}, {place}")
    }

    /// Checks that the device is there, and that `transports` between `local_ranks` ranks of this host reach its memory.
    pub fn check(
        self,
        transports: &[TransportName],
        local_ranks: usize,
    ) -> paceline_failure::Result<()> {
        let refuse = |why: &dyn fmt::Display| usage(format!("--device {self}: {why}"));
        if self != Device::Cpu && transports.contains(&TransportName::Mpi) {
            return refuse(&"--transport mpi does not reach its memory; pass shm or tcp");
        }
        if let Device::Cuda(index) = self
            && let Err(error) = paceline_cuda::probe(index)
        {
            return refuse(&error);
        }
        if transports.contains(&TransportName::Nccl) {
            return self.check_nccl(local_ranks);
        }
        Ok(())
    }

    /// The cards of `local_ranks` ranks of this host, each once. Errors if the driver refuses one.
    pub fn cards(self, local_ranks: usize) -> paceline_cuda::Result<Vec<Card>> {
        let Device::Cuda(index) = self else { return Ok(Vec::new()) };
        let cards = (0..local_ranks).map(|rank| card_of(index, rank));
        cards
            .collect::<paceline_cuda::Result<BTreeSet<usize>>>()?
            .into_iter()
            .map(Card::open)
            .collect()
    }

    /// Checks that NCCL can connect the cards of `local_ranks` ranks.
    fn check_nccl(self, local_ranks: usize) -> paceline_failure::Result<()> {
        let refuse = |why: String| usage(format!("--transport nccl: {why}"));
        let Device::Cuda(index) = self else {
            return refuse(format!(
                "NCCL connects cards, and the device is {self}; pass --device cuda, or another transport"
            ));
        };
        if let Err(error) = paceline_cuda::nccl::version() {
            return refuse(error.to_string());
        }
        let cards = if index.is_some() { 1 } else { paceline_cuda::driver::count().unwrap_or(0) };
        if local_ranks > cards.max(1) {
            let noun = if cards == 1 { "card" } else { "cards" };
            return refuse(format!(
                "{local_ranks} ranks of this host share {cards} {noun}, which NCCL refuses; pass --nproc {cards}, or \
                 --transport shm, which goes through memory of the host"
            ));
        }
        Ok(())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = match self {
            Device::Cpu => return f.write_str("cpu"),
            Device::Cuda(None) => return f.write_str("cuda"),
            Device::Cuda(Some(index)) => return write!(f, "cuda:{index}"),
            Device::Sim(spec) => spec,
        };
        if let Some(seed) = spec.late {
            return write!(f, "sim:late,seed={seed}");
        }
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let (gbit, latency) = (spec.copy_bytes_per_s * 8e-9, us(spec.copy_latency));
        write!(f, "sim:copy={gbit}gbit,{latency}us,launch={}us", us(spec.launch))
    }
}

impl Serialize for Device {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The form of the settings, for errors.
const FORM: &str = "sim, sim:copy=16gbit,10us,launch=5us or sim:late,seed=7";

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        match (name.to_ascii_lowercase().as_str(), settings) {
            ("cpu", "") => Ok(Device::Cpu),
            ("sim", settings) => sim(settings).map(Device::Sim),
            ("cuda", "") => Ok(Device::Cuda(None)),
            ("cuda", index) => index
                .parse()
                .map(|index| Device::Cuda(Some(index)))
                .map_err(|_| format!("{index} is no number of a card; pass cuda or cuda:0")),
            // The device that is there.
            ("auto", "") => {
                Ok(paceline_cuda::probe(None).map_or(Device::Cpu, |()| Device::Cuda(None)))
            }
            _ => Err(format!(
                "there is no device of this name; pass cpu, cuda, cuda:0 or auto, or for an emulated one {FORM}"
            )),
        }
    }
}

/// The card for a rank of a host, in turn, so ranks share cards if there are fewer.
fn card_of(index: Option<usize>, local_rank: usize) -> paceline_cuda::Result<usize> {
    match index {
        Some(index) => Ok(index),
        None => Ok(local_rank % paceline_cuda::driver::count()?.max(1)),
    }
}

fn sim(settings: &str) -> Result<SimSpec, String> {
    let mut spec = SimSpec::DEFAULT;
    let (mut seed, mut is_late, mut is_timed) = (None, false, false);
    let no = |what: String| format!("{what}; pass {FORM}");
    let mut parts = settings.split(',').map(str::trim).filter(|part| !part.is_empty());
    while let Some(part) = parts.next() {
        let (name, value) = part.split_once('=').unwrap_or(("", part));
        match name {
            "" if part == "late" => is_late = true,
            "seed" => seed = Some(value.parse().map_err(|_| no(format!("{value} is no seed")))?),
            "copy" => {
                let latency = parts.next().unwrap_or_default();
                let text = format!("{value},{latency}");
                let link: Link = text.parse().map_err(|_| {
                    no(format!("copy={text}: copies have a bandwidth and a latency"))
                })?;
                spec.copy_bytes_per_s = link.bytes_per_s;
                spec.copy_latency = time(link.latency_s, latency)?;
                is_timed = true;
            }
            "launch" => {
                let seconds = parse_seconds(value);
                let seconds = seconds.ok_or_else(|| no(format!("launch={value} is no time")))?;
                spec.launch = time(seconds, value)?;
                is_timed = true;
            }
            _ => return Err(no(format!("{part} is no setting of an emulated accelerator"))),
        }
    }
    match (is_late, seed) {
        (true, _) if is_timed => {
            Err("in the late mode nothing takes a stated time; leave copy and launch out".into())
        }
        (false, Some(_)) => {
            Err("a seed draws the order of the late mode; pass late too, or leave it out".into())
        }
        (true, seed) => Ok(SimSpec::late(seed.unwrap_or_default())),
        (false, None) => Ok(spec),
    }
}

/// A time of less than a second; more is taken for a mistake.
fn time(seconds: f64, text: &str) -> Result<Duration, String> {
    if (0.0..1.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{text} is too long; pass less than 1s"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let device = |text: &str| text.parse::<Device>();
        assert_eq!(device("cpu"), Ok(Device::Cpu));
        assert_eq!(device("sim"), Ok(Device::Sim(SimSpec::DEFAULT)));
        for text in ["sim:copy=16gbit,10us,launch=5us", "sim:late,seed=7", "cpu", "cuda", "cuda:1"]
        {
            assert_eq!(device(text).unwrap().to_string(), text);
        }
        let spec = SimSpec {
            copy_bytes_per_s: 2e9,
            copy_latency: Duration::from_micros(10),
            ..SimSpec::DEFAULT
        };
        assert_eq!(device("SIM:copy=16gbit,10us"), Ok(Device::Sim(spec)));
        assert_eq!(device("sim:late"), Ok(Device::Sim(SimSpec::late(0))));
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        for (text, words) in [
            ("tpu", "no device of this name"),
            ("cuda:x", "x is no number"),
            ("cuda:-1", "-1 is no number"),
            ("cuda:99999999999999999999", "is no number"),
            ("cpu:0", "no device of this name"),
            ("sim:1", "1 is no setting"),
            ("sim:seed=7", "pass late too"),
            ("sim:late,seed=x", "x is no seed"),
            ("sim:late,seed=-1", "-1 is no seed"),
            ("sim:late,launch=5us", "leave copy and launch out"),
            ("sim:copy=16gbit", "a bandwidth and a latency"),
            ("sim:copy=0gbit,10us", "a bandwidth and a latency"),
            ("sim:copy=infgbit,10us", "a bandwidth and a latency"),
            ("sim:launch=5", "is no time"),
            ("sim:launch=-5us", "is no time"),
            ("sim:launch=2s", "too long"),
            ("sim:launch=1e300s", "is no time"),
            ("sim:copy=1gbit,5s", "too long"),
            ("sim:warp=9", "warp=9 is no setting"),
        ] {
            let error = text.parse::<Device>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
