//! The choices of a run: models, data sets, optimizers and strategies.
//!
//! Each choice has one file with everything about it: its name, its help, its flags, their defaults and
//! checks, and the builder. One line enters the choice into the registry of its kind. The command line,
//! configuration files, sweeps and messages read the registries. No other code matches on the name of a
//! choice. A program that uses paceline adds choices of its own ([`own`]).
//!
//! | registry | flag | settings of a choice |
//! |---|---|---|
//! | [`models::MODELS`] | `--model` | [`models::ModelSettings`] |
//! | [`data::DATA_SETS`] | `--data` | [`data::DataSettings`] |
//! | [`optimizers::OPTIMIZERS`] | `--optimizer` | [`optimizers::OptimizerSettings`] |
//! | [`strategies::STRATEGIES`] | `--strategy` | [`strategies::StrategySettings`] |

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod data;
pub mod models;
pub mod optimizers;
pub mod own;
pub mod registry;
pub mod strategies;
