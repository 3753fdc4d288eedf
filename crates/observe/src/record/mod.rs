//! The measurements of a rank about its own steps.
//!
//! | file | contents |
//! |---|---|
//! | [`times`] | the times of a step, which add up |
//! | [`meter`] | turns spans and records of operations into the times of a step |
//! | [`op_moments`] | the moments of an operation |
//! | [`readiness`] | when in a step its operations and gradients take place |
//! | [`gathers`] | the gathers of parameters, and which use waits for which |
//! | [`steps`] | the measured steps, in bounded memory |
//! | [`samples`] | some of them with the times of operations and gradients, from which advice is computed |
//! | [`memory`] | the memory of a rank by phase and category |
//! | [`card_use`] | how busy its card is, and the card's memory |
//! | [`rank_report`] | the report of a rank at the end |
//! | [`ranks`] | the rules by which the values of the ranks are combined into one |
//! | [`event_room`] | the room for the events of a profile |

pub mod card_use;
pub mod event_room;
pub mod gathers;
pub mod memory;
pub mod meter;
pub mod op_moments;
pub mod rank_report;
pub mod ranks;
pub mod readiness;
pub mod samples;
pub mod steps;
pub mod times;
