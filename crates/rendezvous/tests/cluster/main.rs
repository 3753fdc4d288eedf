//! Ranks of a simulated cluster, under faults. `PACELINE_SEEDS=1000..2000` runs other schedules than the first hundred.

mod excuses;
mod meeting;
mod membership;
mod restarts;
mod schedules;
mod world;
