//! Studies of training with reports of their own. A new one is a file of its own and a line in [`STUDIES`].

pub mod scaling;
pub mod sharded_optimizer;
pub mod strategies;

use crate::study::Study;

/// The studies of `paceline bench`.
pub const STUDIES: &[Study] = &[scaling::STUDY, sharded_optimizer::STUDY];

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::study::Setting;

    /// The setting of runs on a host with this many cores.
    pub fn setting(cores: usize) -> Setting {
        Setting {
            cores,
            model: "cnn".into(),
            params: 688_138,
            transport: "shm".into(),
            link: None,
            threads: 1,
            is_busy: false,
        }
    }

    #[test]
    fn the_flags_of_each_study_fit_together() {
        for study in STUDIES {
            let command = (study.flags)(clap::Command::new(study.name));
            command.clone().debug_assert();
            let words = [study.name, "--nproc=2", "--rounds=1", "--json=file", "--lr=0.1"];
            assert!(command.try_get_matches_from(words).is_ok(), "{}", study.name);
        }
    }
}
