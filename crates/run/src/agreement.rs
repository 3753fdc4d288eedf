//! Whether all ranks were started with the same settings, whoever started them.
//!
//! The ranks compare one digest of their resolved settings before a file is written and before the model is built. If the
//! digests differ, an error names each setting that differs, with its values. A value is compared unless its flag's [`Scope`]
//! says that it is about a host or an output. Input files are compared by content: the samples, the settings of the model, and
//! the commit of a name. The first weights are compared by [`crate::equality`]. For folders of checkpoints it only matters
//! whether they are stated: opening one checks that all ranks see the same.

use std::any::TypeId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::Arg;
use paceline_choices::data::DataConfig;
use paceline_choices::models::ModelConfig;
use paceline_collectives::Group;
use paceline_failure::{Failure, Result};
use paceline_host::text::{listed, warn};
use paceline_launch::device::Device;
use paceline_observe::figures::event::Placed;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::{self, Scope};
use paceline_settings::open_data::OpenData;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The most settings that an error names.
const MOST_NAMED: usize = 6;

/// Flags that can name something that a host has fetched. The commits found are compared instead.
const NAMES: [&str; 3] = ["--pretrained", "--data-dir", "--tokenizer"];
/// Flags that only rank 0 looks at.
const OF_RANK_0: [&str; 2] = ["--save-keep", "--tensorboard"];
const TRAINING_DATA: &str = "the training data";
const CLASS_NAMES: &str = "the names of the classes";
const TEST_DATA: &str = "the test data";
const PROGRAM: &str = "the version of paceline";

/// Resolved settings by name: a flag, or a description in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// The settings of a training run.
    pub fn of_run(config: &TrainConfig, data: &OpenData) -> Self {
        let mut all = Self::default().with_data(&config.data).with_model(&config.model);
        let mut json = json!(config);
        // Data are compared by content. Warnings are about a host.
        for place in ["data", "training_data", "class_names", "warnings"] {
            json[place] = Value::Null;
        }
        json["model"]["found"] = Value::Null;
        all.add(&json);
        all.insert(TRAINING_DATA, config.training_data.as_deref().unwrap_or("computed"));
        all.insert(CLASS_NAMES, listed(&config.class_names));
        all.insert("the number of training samples", data.train.len());
        all.with_test_data(data.test.as_ref().and_then(|test| test.digest()))
    }

    /// The settings of an evaluation: model, data and `others`.
    pub fn of_evaluation(
        model: &ModelConfig,
        data: &DataConfig,
        test_digest: Option<String>,
        others: &Value,
    ) -> Self {
        let mut all = Self::default().with_data(data).with_model(model);
        let mut json = json!({ "model": model });
        json["model"]["found"] = Value::Null;
        all.add(&json);
        all.add(others);
        all.with_test_data(test_digest)
    }

    fn insert(&mut self, name: &str, value: impl ToString) {
        self.0.insert(name.to_owned(), value.to_string());
    }

    /// The location of the data's files does not matter, but the samples in them do.
    fn with_data(mut self, data: &DataConfig) -> Self {
        data.identity().iter().for_each(|(flag, value)| self.insert(flag, value));
        self.with_revisions(data.revisions())
    }

    fn with_model(mut self, model: &ModelConfig) -> Self {
        // The settings in the folder of a pretrained model.
        if let Some(config) = model.hugging_face_config() {
            self.add(&json!({ "model_config": config }));
        }
        self.with_revisions(model.revisions())
    }

    /// Each host looks names up in a cache of its own, and a fetch may end between two look-ups.
    fn with_revisions(mut self, found: Vec<String>) -> Self {
        for (flag, what) in found.iter().filter_map(|found| found.split_once(' ')) {
            self.insert(flag, what);
        }
        self
    }

    fn with_test_data(mut self, digest: Option<String>) -> Self {
        self.insert(TEST_DATA, digest.as_deref().unwrap_or("computed, or none"));
        self.insert(PROGRAM, env!("CARGO_PKG_VERSION"));
        self
    }

    fn add(&mut self, table: &Value) {
        let all = flags::all();
        let known = all.iter().map(|flag| (flags::key(flag), flag)).collect();
        flatten("", table, &known, &mut |name, value| self.insert(name, value));
    }

    fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for (name, value) in &self.0 {
            for text in [name, value] {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text);
            }
        }
        paceline_checkpoint::index::hex(&hash.finalize())
    }
}

/// Visits every value of a table that all ranks must agree on, with its flag or else its place. Paths only count as stated or
/// not.
fn flatten(
    place: &str,
    value: &Value,
    known: &BTreeMap<&str, &Arg>,
    visit: &mut impl FnMut(&str, String),
) {
    let flag = flag(place, known);
    let name = flag.map_or_else(|| place.to_owned(), |flag| format!("--{}", flags::key(flag)));
    let is_of_rank_0 = OF_RANK_0.contains(&&name[..]);
    if flag.is_some_and(|flag| !Scope::of(flag).is_of_all_ranks())
        || NAMES.contains(&&name[..])
        || is_of_rank_0
    {
        return;
    }
    let is_path = |flag: &Arg| flag.get_value_parser().type_id() == TypeId::of::<PathBuf>();
    match value {
        Value::Null => {}
        _ if flag.is_some_and(is_path) => visit(&name, "given".into()),
        Value::Object(table) => table.iter().for_each(|(key, value)| {
            let inner = if place.is_empty() { key.clone() } else { format!("{place}.{key}") };
            flatten(&inner, value, known, visit);
        }),
        value => visit(&name, words(value)),
    }
}

/// The flag that sets the value at a place of `config.json`, if any.
fn flag<'a>(place: &str, known: &BTreeMap<&str, &'a Arg>) -> Option<&'a Arg> {
    let find = |name: &str| known.get(&name.replace(['_', '.'], "-")[..]).copied();
    let inner = match place.rsplit_once('.') {
        // The name of a choice is the value of the flag that it is for.
        Some((choice, "name")) => find(choice),
        Some(("comm" | "copies", last)) => find(last),
        // A choice's setting may be called like a flag of a host.
        Some((_, last)) => find(last).filter(|flag| Scope::of(flag).is_of_all_ranks()),
        None => None,
    };
    find(place).or(inner)
}

/// A value as one would type it.
pub fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(words).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// A rank's first message to the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Told {
    digest: String,
    host: String,
    device: String,
}

/// The first ranks that share a card, in words.
fn shared_card(all: &[Told]) -> Option<String> {
    let card = |told: &Told| Some(told.device.split_once("current_device=")?.1.to_owned());
    let same = |(a, b): (&Told, &Told)| a.host == b.host && card(a).is_some() && card(a) == card(b);
    let mut pairs = (0..all.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    let (a, b) = pairs.find(|(a, b)| same((&all[*a], &all[*b])))?;
    let card = card(&all[a])?;
    Some(format!(
        "ranks {a} and {b} share a card ({card}): they compute in turn, so more ranks than cards are no faster"
    ))
}

/// Fails unless all ranks have the same settings. Returns where each rank is. Collective, before anything else. The first rank
/// of each host reports the differences.
pub fn check(
    group: &Group,
    local_rank: usize,
    device: Device,
    own: &Settings,
) -> Result<Vec<Placed>> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let device = device.place(group.rank(), local_rank);
    let told = Told { digest: own.digest(), host, device };
    let all = group.all_gather_object(&told)?;
    if all.iter().all(|other| other.digest == told.digest) {
        if let Some(words) = shared_card(&all).filter(|_| group.rank() == 0) {
            warn(&words);
        }
        return Ok(all
            .into_iter()
            .map(|Told { host, device, .. }| Placed { host, device })
            .collect());
    }
    let hosts: Vec<String> = all.into_iter().map(|of| of.host).collect();
    let settings: Vec<BTreeMap<String, String>> = group.all_gather_object(&own.0)?;
    let is_first = hosts.iter().position(|host| *host == told.host) == Some(group.rank());
    Err(if is_first || local_rank == 0 {
        Failure::Usage(difference(&hosts, &settings))
    } else {
        Failure::Consequence("the ranks were started with different settings".into())
    })
}

fn difference(hosts: &[String], settings: &[BTreeMap<String, String>]) -> String {
    let names: BTreeSet<&String> = settings.iter().flat_map(BTreeMap::keys).collect();
    let value = |rank: usize, name: &str| settings[rank].get(name).map_or("not set", |of| &of[..]);
    let ranks = 0..settings.len();
    let mut differing: Vec<&str> = names.into_iter().map(String::as_str).collect();
    differing.retain(|name| ranks.clone().any(|rank| value(rank, name) != value(0, name)));
    // Flags first, since other values may follow from them.
    differing.sort_by_key(|name| !name.starts_with("--"));
    let mut fixes = BTreeSet::new();
    let named = differing.iter().take(MOST_NAMED).map(|name| {
        fixes.insert(fix(name));
        let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
        for rank in ranks.clone() {
            let value = value(rank, name);
            match groups.iter_mut().find(|(known, _)| *known == value) {
                Some((_, members)) => members.push(rank),
                None => groups.push((value, vec![rank])),
            }
        }
        let groups = groups.iter().map(|(value, members)| {
            let value = if value.is_empty() { "nothing" } else { value };
            format!("{value} on {}", place(members, hosts))
        });
        format!("{name} is {}", groups.collect::<Vec<_>>().join(" and "))
    });
    let named = named.collect::<Vec<_>>().join("; ");
    let more = match differing.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let fixes = fixes.into_iter().collect::<Vec<_>>().join(", and ");
    format!("the ranks were started with different settings: {named}{more}; {fixes}")
}

/// The user's remedy for a setting that differs.
fn fix(name: &str) -> &'static str {
    match name {
        TRAINING_DATA | TEST_DATA | CLASS_NAMES => "copy the same files to all hosts",
        PROGRAM => "install the same version on all hosts",
        name if NAMES.contains(&name) => {
            "fetch the same revision on all hosts, or state a commit: OWNER/NAME@COMMIT"
        }
        _ => "start all ranks with the same flags and the same files",
    }
}

/// Ranks with their hosts: `rank 0 (host a)`, `ranks 0-3, 5 (hosts a, b)`.
fn place(ranks: &[usize], hosts: &[String]) -> String {
    let named: BTreeSet<&str> = ranks.iter().map(|rank| &hosts[*rank][..]).collect();
    let named: Vec<&str> = named.into_iter().collect();
    let s = |len: usize| if len == 1 { "" } else { "s" };
    let list = in_ranges(ranks);
    format!("rank{} {list} (host{} {})", s(ranks.len()), s(named.len()), named.join(", "))
}

/// Numbers in ascending order, with ranges: `0-3, 5`.
pub fn in_ranges(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let range = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    ranges.iter().map(range).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::resolve_inputs;
    use paceline_settings::spec::RunSpec;

    fn settings(flags: &str) -> Settings {
        let words = std::iter::once("x").chain(flags.split_whitespace());
        let typed = flags::command().try_get_matches_from(words).unwrap();
        let (config, data) = resolve_inputs(&RunSpec::typed(&typed).unwrap(), None).unwrap();
        Settings::of_run(&config, &data)
    }

    const TINY: &str = "--nproc 2 --channels 4 --hidden 8 --samples 200";

    #[test]
    fn every_setting_counts_unless_it_belongs_to_a_host() {
        let own = settings(TINY);
        let of_a_host = ["--threads 2", "--quiet", "--name x", "--json x", "--run-dir x"];
        for flags in of_a_host.into_iter().chain(["--log-every 3", "--timeout 5", "--tensorboard"])
        {
            assert_eq!(settings(&format!("{TINY} {flags}")), own, "{flags}");
        }
        for flags in [
            "--lr 0.5",
            "--optimizer adamw",
            "--seed 7",
            "--momentum 0.5",
            "--clip-grad-norm 1",
            "--accumulate 2",
            "--precision bf16",
            "--loss-scale 1024",
            "--batch-norm",
            "--freeze conv0",
            "--lr-warmup-steps 3",
            "--lr-schedule cosine",
            "--strategy bf16",
            "--bucket-cap-mb 3",
            "--steps 5",
            "--evaluate",
            "--save x",
            "--mesh shard=2 --strategy sharded3",
        ] {
            let other = settings(&format!("{TINY} {flags}"));
            let hosts = ["a".to_owned(), "b".to_owned()];
            let said = difference(&hosts, &[own.0.clone(), other.0.clone()]);
            let flag = flags.split(' ').next().unwrap();
            assert!(said.contains(&format!("{flag} is ")), "{flags}: {said}");
            assert_ne!(own.digest(), other.digest(), "{flags}");
        }
    }

    /// A model's own settings may be called like flags of a host, such as `--json` and `--threads`.
    #[test]
    fn settings_of_a_model_count_whatever_they_are_called() {
        let of = |value: u64| {
            let mut all = Settings::default();
            all.add(
                &json!({ "model_config": { "threads": value, "json": value }, "threads": value }),
            );
            all.0
        };
        let names: Vec<String> = of(1).into_keys().collect();
        assert_eq!(names, ["model_config.json", "model_config.threads"]);
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn what_differs_is_named_with_both_values_and_their_hosts() {
        let of = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
        };
        let hosts: Vec<String> = ["a", "a", "b", "b"].map(str::to_owned).into();
        let here = of(&[("--lr", "0.1"), ("--seed", "1")]);
        let there = of(&[("--lr", "0.2"), ("--seed", "1"), ("--steps", "5")]);
        let all = [here.clone(), here.clone(), there.clone(), there];
        assert_eq!(
            difference(&hosts, &all),
            "the ranks were started with different settings: --lr is 0.1 on ranks 0, 1 (host a) and 0.2 on ranks 2, 3 \
             (host b); --steps is not set on ranks 0, 1 (host a) and 5 on ranks 2, 3 (host b); start all ranks with the \
             same flags and the same files"
        );
        let commit = |id: &str| of(&[("--pretrained", &format!("m (commit {id})"))]);
        let all = [commit("1"), commit("1"), commit("2")];
        assert_eq!(
            difference(&hosts, &all),
            "the ranks were started with different settings: --pretrained is m (commit 1) on ranks 0, 1 (host a) \
             and m (commit 2) on rank 2 (host b); fetch the same revision on all hosts, or state a commit: \
             OWNER/NAME@COMMIT"
        );
        let many = |salt: &str| -> BTreeMap<String, String> {
            (0..9).map(|n| (format!("--flag{n}"), salt.to_owned())).collect()
        };
        assert!(difference(&hosts, &[many("a"), many("b")]).contains("; and 3 more; start"));
        assert_eq!(in_ranges(&[0, 1, 2, 3, 5, 7, 8]), "0-3, 5, 7, 8");
    }
}
