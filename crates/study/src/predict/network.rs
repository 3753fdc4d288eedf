//! The network of a prediction, and the costs of operations on it: one link between every two ranks, or hosts of
//! several ranks with a fast link inside and a slower one between.
//!
//! The cost model ([`paceline_collectives::Cost`]) gives the times of one link. For hosts, this file adds up those of both links. The ranks
//! of a host have consecutive numbers and share its link. With `k` ranks on each of `h` hosts, `n = h k`, and `S` bytes:
//!
//! | algorithm | on the links |
//! |---|---|
//! | `hybrid` | an all-reduce of `S` bytes in each host, and then, on the link between hosts, the messages of `k` rails of the transport `hybrid` |
//! | `direct` | three rounds, as in the cost model, each as long as the slower link takes: in a round a rank sends `k-1` blocks inside its host, and the `k` ranks of a host send `k (n-k)` blocks out of it |
//! | `ring` | the exchange of headers, and `2 (n-1)` steps, in which one block of `S/n` bytes goes over each link; each step is as long as the slower link takes |

use paceline_collectives::{Algorithm, Cost, Link, OpKind};
use paceline_memory::DType;

/// Bytes of the header that shows another rank a call.
const HEADER_BYTES: f64 = paceline_collectives::HEADER_BYTES as f64;

/// How an all-reduce is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Every rank exchanges blocks with all others.
    Direct,
    /// Blocks go from neighbor to neighbor.
    Ring,
    /// Ranks of a host combine their data, and rails carry partial sums between hosts.
    Hybrid,
}

impl Route {
    /// The name of the algorithm, or of the transport that works in this way.
    pub fn name(self) -> &'static str {
        match self {
            Route::Direct => Algorithm::Direct.name(),
            Route::Ring => Algorithm::Ring.name(),
            Route::Hybrid => "hybrid",
        }
    }

    /// The algorithm of the cost model for ranks that all have the same link between them.
    pub fn algorithm(self) -> Algorithm {
        match self {
            Route::Ring => Algorithm::Ring,
            Route::Direct | Route::Hybrid => Algorithm::Direct,
        }
    }
}

/// Hosts with several ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hosts {
    /// Ranks on each host.
    pub ranks_per_host: usize,
    /// The link between two ranks of a host.
    pub inside: Link,
}

/// Ranks, and the links between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Number of ranks: with hosts, a multiple of the ranks of a host.
    pub ranks: usize,
    /// The link between ranks or, with hosts, between hosts.
    pub link: Link,
    /// Hosts of several ranks, if there are any.
    pub hosts: Option<Hosts>,
    /// How an all-reduce is carried out.
    pub way: Route,
}

impl Network {
    /// The milliseconds of an all-reduce of `bytes` bytes.
    pub fn all_reduce_ms(&self, bytes: u64) -> f64 {
        let Some(hosts) = self.hosts else {
            return on_link_ms(&self.link, OpKind::AllReduce, self.way, self.ranks, bytes);
        };
        let block = bytes as f64 / self.ranks as f64;
        let seconds = match self.way {
            Route::Direct => self.round_s(&hosts, HEADER_BYTES) + 2.0 * self.round_s(&hosts, block),
            Route::Ring => {
                let step =
                    one_message_s(&hosts.inside, block).max(one_message_s(&self.link, block));
                self.round_s(&hosts, HEADER_BYTES) + 2.0 * (self.ranks - 1) as f64 * step
            }
            Route::Hybrid => {
                let (num_hosts, local) = (self.ranks / hosts.ranks_per_host, hosts.ranks_per_host);
                let inside = hosts.inside.time(OpKind::AllReduce, Algorithm::Direct, local, bytes);
                let rail =
                    Cost::between_hosts(OpKind::AllReduce, num_hosts, local, bytes, DType::F32);
                let Cost { steps, bytes } = rail.unwrap_or(Cost { steps: 0, bytes: 0 });
                let between = f64::from(steps) * self.link.latency_s
                    + local as f64 * bytes as f64 / self.link.bytes_per_s;
                inside.as_secs_f64() + between
            }
        };
        1e3 * seconds
    }

    /// The milliseconds of an all-gather after which each rank has `bytes` bytes.
    pub fn all_gather_ms(&self, bytes: u64) -> f64 {
        let Some(hosts) = self.hosts else {
            return on_link_ms(&self.link, OpKind::AllGather, self.way, self.ranks, bytes);
        };
        let block = bytes as f64 / self.ranks as f64;
        let seconds = match self.way {
            Route::Direct | Route::Ring => {
                self.round_s(&hosts, HEADER_BYTES) + self.round_s(&hosts, block)
            }
            Route::Hybrid => {
                let local = hosts.ranks_per_host;
                let inside = hosts.inside.time(OpKind::AllGather, Algorithm::Direct, local, bytes);
                let others = (self.ranks / local - 1) as f64;
                let local = local as f64;
                // Each rank sends its block, and the calls of its host, to one rank of each other host.
                let sent = others * local * (block + HEADER_BYTES * local);
                inside.as_secs_f64() + 2.0 * self.link.latency_s + sent / self.link.bytes_per_s
            }
        };
        1e3 * seconds
    }

    /// The same network with another bandwidth of [`Network::link`].
    pub fn with_bandwidth(&self, bytes_per_s: f64) -> Self {
        Self { link: Link { bytes_per_s, ..self.link }, ..*self }
    }

    /// The seconds of a round in which every rank sends every other rank `bytes` bytes. Both links work at the same time.
    fn round_s(&self, hosts: &Hosts, bytes: f64) -> f64 {
        let local = hosts.ranks_per_host as f64;
        let inside = one_message_s(&hosts.inside, (local - 1.0) * bytes);
        inside.max(one_message_s(&self.link, local * (self.ranks as f64 - local) * bytes))
    }
}

fn on_link_ms(link: &Link, kind: OpKind, way: Route, ranks: usize, bytes: u64) -> f64 {
    link.time(kind, way.algorithm(), ranks, bytes).as_secs_f64() * 1e3
}

fn one_message_s(link: &Link, bytes: f64) -> f64 {
    link.latency_s + bytes / link.bytes_per_s
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Links without latency of 100 GB/s inside hosts and 1 GB/s between them, or with 1 us and 1 ms.
    fn network(ranks: usize, ranks_per_host: usize, way: Route, has_latency: bool) -> Network {
        let latency = if has_latency { 1.0 } else { 0.0 };
        let inside = Link { bytes_per_s: 100e9, latency_s: 1e-6 * latency };
        let link = Link { bytes_per_s: 1e9, latency_s: 1e-3 * latency };
        Network { ranks, link, hosts: Some(Hosts { ranks_per_host, inside }), way }
    }

    /// The cost model rounds a time to nanoseconds.
    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-6, "{a} ms, not {b}");
    }

    #[test]
    fn one_link_costs_what_the_cost_model_says() {
        let link: Link = "10gbit,50us".parse().unwrap();
        let of = |way| Network { ranks: 4, link, hosts: None, way };
        // 100 MB at 1.25 GB/s half as often again, headers of 3 x 88 bytes, and three or seven latencies.
        let moved_ms = 120.0 + 264.0 / 1.25e6;
        close(of(Route::Direct).all_reduce_ms(100_000_000), moved_ms + 0.15);
        close(of(Route::Ring).all_reduce_ms(100_000_000), moved_ms + 0.35);
        close(of(Route::Direct).all_gather_ms(100_000_000), 60.0 + 264.0 / 1.25e6 + 0.1);
    }

    #[test]
    fn hosts_of_several_ranks_have_two_speeds() {
        // 2 hosts of 4 ranks, 80 MB. Inside: 2 x 3/4 x 80 MB and 3 headers at 100 GB/s. Between: 4 rails of
        // 20 MB: a rank sends half and gets half back; and headers of 4 ranks each.
        let hybrid = network(8, 4, Route::Hybrid, false);
        let inside_ms = (120e6 + 3.0 * 88.0) / 100e6;
        let between_ms = 4.0 * (20e6 + 4.0 * 88.0) / 1e6;
        close(hybrid.all_reduce_ms(80_000_000), inside_ms + between_ms);
        let slow = network(8, 4, Route::Hybrid, true);
        close(slow.all_reduce_ms(80_000_000), inside_ms + between_ms + 3e-3 + 3.0);
        // Direct: twice, 4 ranks send 4 others 10 MB each; and their headers.
        let direct = network(8, 4, Route::Direct, false);
        close(direct.all_reduce_ms(80_000_000), (2.0 * 16.0 * 10e6 + 16.0 * 88.0) / 1e6);
        close(network(8, 4, Route::Direct, true).all_reduce_ms(80_000_000), 320.001408 + 3.0);
        // Ring: 14 steps of 10 MB on the slow link.
        let ring = network(8, 4, Route::Ring, false);
        close(ring.all_reduce_ms(80_000_000), 14.0 * 10.0 + 16.0 * 88.0 / 1e6);
        close(network(8, 4, Route::Ring, true).all_reduce_ms(80_000_000), 140.001408 + 15.0);
    }

    #[test]
    fn gathers_cross_the_link_between_hosts_once() {
        // 2 hosts of 2 ranks, 40 MB in all: a rank sends its 10 MB to one rank of the other host.
        let inside_ms = (20e6 + 88.0) / 100e6;
        let between_ms = 2.0 * (10e6 + 176.0) / 1e6;
        let hybrid = network(4, 2, Route::Hybrid, true);
        close(hybrid.all_gather_ms(40_000_000), inside_ms + between_ms + 2e-3 + 2.0);
        // Direct: to both.
        let direct = network(4, 2, Route::Direct, true);
        close(direct.all_gather_ms(40_000_000), 4.0 * (10e6 + 88.0) / 1e6 + 2.0);
    }

    #[test]
    fn another_bandwidth_is_that_between_hosts() {
        let faster = network(8, 4, Route::Ring, false).with_bandwidth(1e12);
        assert_eq!(faster.link, Link { bytes_per_s: 1e12, latency_s: 0.0 });
        // Now the link inside is the slower one.
        let header_ms = (3.0 * 88.0_f64 / 1e11).max(16.0 * 88.0 / 1e12) * 1e3;
        close(faster.all_reduce_ms(80_000_000), 14.0 * 0.1 + header_ms);
    }
}
