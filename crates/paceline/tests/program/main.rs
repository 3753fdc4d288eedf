//! The program as its users see it: what it does, prints, writes and refuses.
//!
//! One file for each command or subject, and one executable for all: each one would contain the whole program again. Tests that
//! watch a terminal, or need a browser, a card or a user of their own, have executables of their own, beside this folder.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/hub.rs"]
mod hub;

mod agreement;
mod analyze;
mod bad_input;
mod bad_llama_input;
mod batch_norm;
mod bench;
mod check;
mod checkpoints;
mod classify;
mod combinations;
mod completions;
mod config;
mod devices;
mod doctor;
mod doors;
mod elastic;
mod evaluate;
mod fetch;
mod foreign_text;
mod generate;
mod generations;
mod going_back;
mod help;
mod instructions;
mod knobs;
mod lab;
mod launcher;
mod layouts;
mod llama;
mod llama_tools;
mod loss_scale;
mod memory;
mod new;
mod numerics;
mod output;
mod own;
mod own_data;
mod own_text;
mod pipeline_checkpoints;
mod pipelines;
mod plan;
mod planted;
mod predict;
mod predict_trace;
mod profile;
mod recipes;
mod record;
mod record_watch;
mod recorded;
mod restarts;
mod resume;
mod scaling;
mod schedule;
mod several_hosts;
mod sharding;
mod state;
mod strategies;
mod studies;
mod sweep;
mod tensor;
mod tensorboard;
mod trace;
mod training;
mod wrong_inputs;
