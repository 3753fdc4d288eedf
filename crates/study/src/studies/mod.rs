//! Studies of training with reports of their own. A new one is a file of its own and a line in [`STUDIES`].

pub mod bucket_cost;
pub mod buckets;
pub mod naive_ddp;
pub mod scaling;
pub mod sharded_optimizer;
pub mod strategies;

use crate::study::Study;

/// The studies of `paceline bench`.
pub const STUDIES: &[Study] =
    &[scaling::STUDY, buckets::STUDY, naive_ddp::STUDY, sharded_optimizer::STUDY];

#[cfg(test)]
mod tests {
    use paceline_table::table::Columns;

    use super::*;

    #[test]
    fn files_have_every_number_of_a_row() {
        fn header<T>(columns: &Columns<T>) -> String {
            columns.table(std::iter::empty::<T>()).csv()
        }
        insta::assert_snapshot!(header(&buckets::table::columns()), @"strategy,bucket_mb,num_buckets,step_ms,step_ms_min,step_ms_max,rounds,exposed_pct,exposed_ms,hidden_ms");
        insta::assert_snapshot!(header(&naive_ddp::table::columns()), @"case,strategy,bucket_mb,num_buckets,step_ms,step_ms_min,step_ms_max,rounds,exposed_pct,exposed_ms,hidden_ms,ops_per_step");
        insta::assert_snapshot!(header(&sharded_optimizer::table::columns()), @"strategy,step_ms,step_ms_min,step_ms_max,rounds,optimizer_ms,exposed_pct,exposed_ms,hidden_ms,init_peak_mb,before_step_peak_mb,step_peak_mb,init_mb,before_step_mb,after_step_mb,parameters_mb,gradients_mb,optimizer_mb");
        insta::assert_snapshot!(header(&scaling::table::columns()), @"mode,ranks,global_batch,is_oversubscribed,step_ms,step_ms_min,step_ms_max,rounds,samples_per_s,speedup,efficiency_pct,t_comm_ms,exposed_pct,exposed_ms,hidden_ms,waiting_ms,exposed_waiting_ms,compute_ms,serial_pct");
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
