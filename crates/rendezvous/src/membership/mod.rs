//! Who belongs to a run whose ranks come and go.
//!
//! The launcher of the first host has the list of members ([`Members`]). Each rank has a connection to it ([`RunMember`]): a rank says
//! that it is ready, and waits until the list says who belongs to the next *generation*. The members of a generation then
//! exchange texts through the same connections, such as their addresses, and form their group by themselves. A member whose
//! connection ends has gone.
//!
//! | file | purpose |
//! |---|---|
//! | `agreement.rs` | decides who belongs to a generation, without sockets or clocks |
//! | `generation.rs` | the members of one generation, and the texts that they exchange |
//! | `server.rs` | the launcher's side: one thread for all connections |
//! | `door.rs` | new connections, until they have proven that they know the secret |
//! | `client.rs` | the rank's side |
//! | `wire.rs` | messages |
//!
//! Both sides prove to each other that they know the secret and never send it (`hello.rs`). What follows is neither encrypted
//! nor authenticated.

mod agreement;
mod client;
mod door;
#[cfg(feature = "fuzzing")]
#[path = "../../../../fuzz/checks/membership.rs"]
pub mod fuzzing;
mod generation;
#[cfg(test)]
mod history_tests;
mod server;
#[cfg(test)]
mod tests;
mod wire;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use client::RunMember;
pub use server::Members;

use crate::RunKey;
use crate::hello::Who;

/// A member's place in a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GenerationPlace {
    /// The number of the generation, from 1.
    pub generation: u64,
    /// This member's index in `members`: its rank, if it is below `size`. Otherwise it is a spare, which is not needed now: it
    /// hands over what it has, and waits for the next generation.
    pub index: usize,
    /// The numbers of all members in rank order, then those of the spares. A number is never given twice.
    pub members: Vec<u64>,
    /// The number of ranks.
    pub size: usize,
}

/// The terms on which processes belong to a run.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The numbers of ranks that a generation can have, ascending.
    pub sizes: Vec<usize>,
    /// How many ranks the launchers of all hosts start. They have the numbers from 0.
    pub expected: usize,
    /// With several hosts, how many of these the first host starts. Then a part that is cut off does not go on alone.
    pub first_host: Option<usize>,
    /// Settings on which all members must agree, in words.
    pub settings: String,
    /// How long the others wait for a member that does not answer.
    pub evict_after: Duration,
    /// How long the first generation waits for the ranks that the launchers start, and a later one for more ranks if too few are left.
    pub limit: Duration,
}

/// A change of the members, for the launcher's messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberEvent {
    /// A process has joined that waits for the next generation.
    Joined {
        /// Its number.
        number: u64,
        /// Its address, in words.
        from: String,
    },
    /// A member has gone. `how` is `None` if its work was done.
    Gone {
        /// Its number.
        number: u64,
        /// How it ended, in words.
        how: Option<String>,
    },
    /// A member did not answer for so long that the others go on without it.
    LeftOut {
        /// Its number.
        number: u64,
        /// The members that have missed it.
        missed_by: Vec<u64>,
    },
    /// These members go on as a new generation.
    Next {
        /// The number of the generation, from 1.
        generation: u64,
        /// The numbers of its members in rank order.
        members: Vec<u64>,
        /// Members that this generation does not need.
        spares: Vec<u64>,
    },
    /// Too few members are left. More may come.
    TooFew {
        /// How many are left.
        left: usize,
        /// How many are needed.
        needed: usize,
    },
    /// Nobody goes on.
    Failed {
        /// Why, in words.
        reason: String,
    },
}

/// Members have no rank before they have joined.
const WHO: Who = Who { rank: 0, world: 1, launch: None };

/// The key of connections to the list of members, which differs from that of a store with the same secret.
fn key(secret: &str) -> RunKey {
    RunKey::of_secret(secret).of_listener("the list of members")
}
