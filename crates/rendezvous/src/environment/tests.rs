//! Environments of every launcher, complete and incomplete.

use super::slurm::{first_host, tasks_of_node};
use super::*;
use crate::{Rendezvous, RendezvousPoint};

fn read(variables: &[(&str, &str)]) -> Result<Option<Placement>, EnvironmentError> {
    Placement::from_lookup(|name| {
        let found = variables.iter().find(|(n, _)| *n == name);
        found.map(|(_, value)| value.to_string())
    })
}

/// rank, world size, local rank, local world size, node
type Place = (usize, usize, usize, usize, Option<usize>);

fn place(variables: &[(&str, &str)]) -> (Launcher, Place) {
    let p = read(variables).unwrap().unwrap();
    (p.launcher, (p.rank, p.world_size, p.local_rank, p.local_world_size, p.node))
}

fn point(variables: &[(&str, &str)]) -> RendezvousPoint {
    read(variables).unwrap().unwrap().rendezvous().unwrap().point.clone()
}

fn error(variables: &[(&str, &str)]) -> String {
    read(variables).unwrap_err().to_string()
}

fn by_user(name: &str) -> RendezvousPoint {
    let user = rustix::process::geteuid().as_raw();
    RendezvousPoint::Local { name: format!("paceline-{user}-{name}") }
}

fn tcp(host: &str, port: u16) -> RendezvousPoint {
    RendezvousPoint::Tcp { host: host.into(), port }
}

const TORCHRUN: [(&str, &str); 10] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("GROUP_RANK", "1"),
    ("MASTER_ADDR", "host-a"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "run7"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

const OPEN_MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];

const SLURM: [(&str, &str); 9] = [
    ("SLURM_PROCID", "2"),
    ("SLURM_NTASKS", "3"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NNODES", "2"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_JOB_NODELIST", "gpu-[003,007]"),
    ("SLURM_STEP_TASKS_PER_NODE", "2,1"),
];

#[test]
fn torchruns_ranks_meet_at_its_agent() {
    assert_eq!(place(&TORCHRUN), (Launcher::Torchrun, (3, 4, 1, 2, Some(1))));
    let agent =
        RendezvousPoint::Agent { host: "host-a".into(), port: 29500, round: "run7/2".into() };
    assert_eq!(point(&TORCHRUN), agent);
    // Without the agent's store, the port is for rank 0.
    assert_eq!(point(&TORCHRUN[..9]), tcp("host-a", 29500));
}

#[test]
fn our_ranks_meet_locally() {
    let ours = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "4000"),
        ("PACELINE_SECRET", "s"),
    ];
    assert_eq!(place(&ours), (Launcher::Paceline, (1, 2, 1, 2, Some(0))));
    assert_eq!(point(&ours), Rendezvous::by_port(4000, "s").point);
    assert_eq!(read(&ours).unwrap().unwrap().rendezvous.unwrap().secret, "s");
}

#[test]
fn ranks_by_hand() {
    let hand = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "4000")];
    assert_eq!(place(&hand), (Launcher::ByHand, (1, 2, 1, 2, Some(0))));
    assert_eq!(point(&hand), by_user("4000"));
    assert_eq!(point(&[hand.as_slice(), &[("MASTER_ADDR", "h")]].concat()), tcp("h", 4000));
    let elsewhere = [hand.as_slice(), &[("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")]].concat();
    assert!(error(&elsewhere).contains("MASTER_PORT is set"), "{}", error(&elsewhere));
    let nowhere = read(&hand[..2]).unwrap().unwrap().rendezvous().unwrap_err().to_string();
    assert!(nowhere.contains("MASTER_PORT is not set"), "{nowhere}");
    assert_eq!(read(&[]).unwrap(), None);
}

#[test]
fn open_mpis_ranks_meet_by_their_job() {
    let one_host = [OPEN_MPI.as_slice(), &[("PMIX_NAMESPACE", "prterun-a-17@1")]].concat();
    assert_eq!(place(&one_host), (Launcher::OpenMpi, (1, 2, 1, 2, Some(0))));
    assert_eq!(point(&one_host), by_user("prterun-a-17@1"));
    let job = [OPEN_MPI.as_slice(), &[("OMPI_MCA_ess_base_jobid", "99")]].concat();
    assert_eq!(point(&job), by_user("99"));
    let long = "x".repeat(200) + "17@1";
    let long = [OPEN_MPI.as_slice(), &[("PMIX_NAMESPACE", &long)]].concat();
    let RendezvousPoint::Local { name } = point(&long) else { panic!("not local") };
    assert!(name.len() < 100 && name.ends_with("17@1"), "{name}");

    let mut hosts = one_host.clone();
    hosts[2].1 = "0";
    hosts[3].1 = "1";
    assert_eq!(place(&hosts).1, (1, 2, 0, 1, Some(1)));
    let missing = read(&hosts).unwrap().unwrap().rendezvous().unwrap_err().to_string();
    assert!(missing.contains("mpirun -x MASTER_ADDR"), "{missing}");
    hosts.extend([("MASTER_ADDR", "host-a"), ("MASTER_PORT", "29500")]);
    assert_eq!(point(&hosts), tcp("host-a", 29500));
}

#[test]
fn pmi() {
    let mpich = [
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "4"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "2"),
        ("MASTER_ADDR", "h"),
        ("MASTER_PORT", "1"),
    ];
    assert_eq!(place(&mpich), (Launcher::Mpich, (1, 4, 1, 2, Some(0))));
    assert_eq!(point(&mpich), tcp("h", 1));
    let missing = read(&mpich[..4]).unwrap().unwrap().rendezvous().unwrap_err().to_string();
    assert!(missing.contains("mpiexec -genv MASTER_ADDR"), "{missing}");
    // srun --mpi=pmi2 speaks PMI, but only Slurm's own variables tell the hosts.
    let both = [SLURM.as_slice(), &[("PMI_RANK", "2"), ("PMI_SIZE", "3")]].concat();
    assert_eq!(place(&both), (Launcher::Slurm, (2, 3, 0, 1, Some(1))));
}

#[test]
fn slurms_steps_meet_at_their_first_host() {
    assert_eq!(place(&SLURM), (Launcher::Slurm, (2, 3, 0, 1, Some(1))));
    let RendezvousPoint::Tcp { host, port } = point(&SLURM) else { panic!("not tcp") };
    assert_eq!(host, "gpu-003");
    assert!((15_000..31_000).contains(&port), "{port}");
    let other_job: Vec<_> =
        SLURM.iter().map(|(n, v)| (*n, if *n == "SLURM_JOB_ID" { "4712" } else { v })).collect();
    assert_ne!(point(&other_job), tcp("gpu-003", port));

    let one_host = [
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "0"),
        ("SLURM_NNODES", "1"),
        ("SLURM_JOB_ID", "4711"),
        ("SLURM_STEP_ID", "3"),
    ];
    assert_eq!(place(&one_host), (Launcher::Slurm, (1, 2, 1, 2, Some(0))));
    assert_eq!(point(&one_host), by_user("4711.3"));
}

#[test]
fn a_batch_script_is_no_rank() {
    let without_step: Vec<_> =
        SLURM.iter().copied().filter(|(n, _)| *n != "SLURM_STEP_ID").collect();
    assert_eq!(read(&without_step).unwrap(), None);
    let batch_step = [without_step.as_slice(), &[("SLURM_STEP_ID", "4294967291")]].concat();
    assert_eq!(read(&batch_step).unwrap(), None);
}

#[test]
fn the_first_launcher_counts() {
    let all = [TORCHRUN.as_slice(), &OPEN_MPI, &[("PMI_RANK", "0"), ("PMI_SIZE", "1")], &SLURM];
    assert_eq!(place(&all.concat()).0, Launcher::Torchrun);
    assert_eq!(place(&all[1..].concat()).0, Launcher::OpenMpi);
    assert_eq!(place(&all[2..].concat()).0, Launcher::Mpich);
    assert_eq!(place(&all[3..].concat()).0, Launcher::Slurm);
}

#[test]
fn half_sets_name_what_is_missing() {
    for (there, missing) in [
        ("RANK", "WORLD_SIZE"),
        ("WORLD_SIZE", "RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_RANK", "PMI_SIZE"),
        ("PMI_SIZE", "PMI_RANK"),
    ] {
        let message = error(&[(there, "0")]);
        assert!(message.contains(&format!("{there} is set")), "{message}");
        assert!(message.contains(&format!("but {missing} is not")), "{message}");
        assert!(message.contains(&format!("unset {there}")), "{message}");
    }
    let slurm = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0")];
    assert!(error(&slurm).contains("but SLURM_NTASKS is not"), "{}", error(&slurm));
    let local = [("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")];
    assert!(error(&local).contains("but LOCAL_WORLD_SIZE is not"), "{}", error(&local));
}

#[test]
fn impossible_numbers_are_named() {
    let at = |port| [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", port)];
    for port in ["0", "99999"] {
        let problem = format!("MASTER_PORT={port} in the environment is not a port number");
        assert_eq!(error(&at(port)), problem);
    }
    let world = |rank, size| [("RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", "4000")];
    assert!(error(&world("2", "2")).contains("ranks count from 0 to 1"));
    assert!(error(&world("0", "0")).contains("RANK=0 does not fit WORLD_SIZE=0"));
    assert!(error(&world("x", "2")).contains("RANK=\"x\" in the environment is not a number"));
    let mut local = OPEN_MPI;
    local[2].1 = "2";
    assert!(error(&local).contains("OMPI_COMM_WORLD_LOCAL_RANK=2 does not fit"));
    let mut list = SLURM;
    list[7].1 = "gpu-[003";
    assert!(error(&list).contains("SLURM_JOB_NODELIST=\"gpu-[003\""), "{}", error(&list));
}

#[test]
fn slurms_lists() {
    for (list, first) in [
        ("node[003-007,9]", "node003"),
        ("a,b", "a"),
        ("single.domain", "single.domain"),
        ("rack[2-3]-node[10-12]-ib,x", "rack2-node10-ib"),
        ("n[5,1]", "n5"),
    ] {
        assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
    }
    for broken in ["", ",a", "a[", "a[]", "a[x]"] {
        assert_eq!(first_host(broken), None, "{broken}");
    }
    let tasks: Vec<_> = (0..5).map(|node| tasks_of_node("2(x3),1", node)).collect();
    assert_eq!(tasks, [Some(2), Some(2), Some(2), Some(1), None]);
    assert_eq!(tasks_of_node("4", 0), Some(4));
    assert_eq!(tasks_of_node("4(x", 0), None);
}

#[test]
fn the_variables_of_every_launcher_are_named() {
    let names = |variables: &[(&str, &str)]| read(variables).unwrap().unwrap().variables;
    let pmi = [("PMI_RANK", "2"), ("PMI_SIZE", "3")];
    assert_eq!(names(&TORCHRUN), ["RANK", "WORLD_SIZE"]);
    assert_eq!(names(&OPEN_MPI), ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]);
    assert_eq!(names(&pmi), ["PMI_RANK", "PMI_SIZE"]);
    assert_eq!(names(&SLURM), ["SLURM_PROCID"]);
    // Without those of the first launcher, this process would be a rank of the next one.
    let nested = [&TORCHRUN[..], &SLURM, &pmi].concat();
    assert_eq!(names(&nested), ["RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID"]);
    let half = [&TORCHRUN[..], &OPEN_MPI[..1]].concat();
    assert_eq!(names(&half), ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK"]);
}
