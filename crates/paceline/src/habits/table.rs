//! The flags of other programs, and what they are called here.

/// The words of others for one thing.
pub(super) struct Habit {
    pub theirs: &'static [&'static str],
    /// What it is.
    pub what: &'static str,
    /// The flag here, without dashes.
    pub flag: &'static str,
    /// The value that has to be passed, if not the one that was typed.
    pub value: Option<&'static str>,
}

const fn habit(theirs: &'static [&'static str], what: &'static str, flag: &'static str) -> Habit {
    Habit { theirs, what, flag, value: None }
}

const RANKS: &[&str] = &[
    "-np",
    "-n",
    "--np",
    "-g",
    "--ngpus",
    "--n-gpus",
    "--n_gpus",
    "--gpus",
    "--num-gpus",
    "--num_gpus",
    "--nprocs",
    "--num-processes",
    "--num_processes",
    "--nproc-per-node",
    "--nproc_per_node",
    "--world-size",
    "--world_size",
    "--ranks",
    "--num-ranks",
    "--num_ranks",
    "--workers",
];
const RENDEZVOUS: &[&str] =
    &["--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-backend", "--rdzv_backend", "--rdzv-id"];

pub(super) const HABITS: &[Habit] = &[
    habit(RANKS, "the number of ranks", "nproc"),
    habit(RENDEZVOUS, "the place where hosts meet", "master-addr"),
    habit(
        &["--nodes", "--num-nodes", "--num_nodes", "--num-machines", "--num_machines"],
        "the number of hosts",
        "nnodes",
    ),
    habit(
        &["--port", "--main-process-port", "--main_process_port"],
        "the port where hosts meet",
        "master-port",
    ),
    habit(
        &["--num-epochs", "--num_epochs", "--num_train_epochs", "--max-epochs", "--max_epochs"],
        "the number of epochs",
        "epochs",
    ),
    habit(
        &[
            "--max-steps",
            "--max_steps",
            "--num-steps",
            "--num_steps",
            "--iterations",
            "--iters",
            "--max-iters",
            "--max_iters",
            "--train-iters",
        ],
        "the number of steps",
        "steps",
    ),
    habit(
        &[
            "-b",
            "--bs",
            "--batch",
            "--per_device_train_batch_size",
            "--per-device-train-batch-size",
            "--micro-batch-size",
            "--micro_batch_size",
            "--train_micro_batch_size_per_gpu",
        ],
        "the batch of a rank",
        "batch-size",
    ),
    habit(
        &["--grad-accum", "--grad_accum", "--accum-steps", "--accumulate-grad-batches"],
        "the number of batches of an optimizer step",
        "accumulate",
    ),
    habit(
        &["--max-grad-norm", "--max_grad_norm", "--grad-clip", "--grad_clip", "--clip-grad"],
        "the largest norm of all gradients",
        "clip-grad-norm",
    ),
    habit(&["--optim", "--opt"], "the optimizer", "optimizer"),
    habit(&["--wd", "--decay"], "weight decay", "weight-decay"),
    habit(
        &["--scheduler", "--lr-scheduler", "--lr_scheduler", "--lr_scheduler_type"],
        "the course of the learning rate",
        "lr-schedule",
    ),
    habit(
        &["--warmup", "--num-warmup-steps", "--num_warmup_steps", "--lr-warmup"],
        "the number of steps over which the learning rate rises",
        "lr-warmup-steps",
    ),
    habit(
        &["--checkpoint-dir", "--checkpoint_dir", "--save-dir", "--save_dir"],
        "the folder of checkpoints",
        "save",
    ),
    habit(
        &["--save-interval", "--save_interval", "--save-steps", "--save_steps"],
        "the number of steps between two checkpoints",
        "save-every",
    ),
    habit(
        &[
            "--resume-from-checkpoint",
            "--resume_from_checkpoint",
            "--resume-from",
            "--load",
            "--load-checkpoint",
        ],
        "the checkpoint to go on from",
        "resume",
    ),
    habit(
        &["--eval", "--do-eval", "--do_eval", "--validate", "--val"],
        "evaluation on the test set",
        "evaluate",
    ),
    habit(
        &["--eval-steps", "--eval_steps", "--eval-interval", "--eval_interval"],
        "the number of steps between two evaluations",
        "eval-every",
    ),
    habit(&["--dataset", "--dataset-name", "--dataset_name"], "the data set", "data"),
    habit(
        &["--data-path", "--data_path", "--dataset-path", "--data-root", "--dataset-dir"],
        "the folder of the data set",
        "data-dir",
    ),
    habit(
        &["--num-workers", "--num_workers", "--dataloader_num_workers", "--prefetch-factor"],
        "the number of batches that are loaded ahead",
        "load-ahead",
    ),
    habit(
        &["--seq-length", "--seq_length", "--sequence-length", "--block-size", "--block_size"],
        "the length of a sequence",
        "seq-len",
    ),
    habit(
        &["--model-name-or-path", "--model_name_or_path", "--pretrained-model", "--hf-model"],
        "the folder or name of pretrained weights",
        "pretrained",
    ),
    habit(
        &["--gradient-checkpointing", "--gradient_checkpointing", "--activation-checkpointing"],
        "keeping only the inputs of blocks for the backward pass",
        "checkpoint-activations",
    ),
    habit(
        &["--random-seed", "--random_seed", "--manual-seed"],
        "what decides random numbers",
        "seed",
    ),
    habit(
        &["--log-interval", "--log_interval", "--logging-steps", "--logging_steps"],
        "the number of batches between two lines",
        "log-every",
    ),
    habit(&["--output-dir", "--output_dir"], "the folder in which run folders are made", "run-dir"),
    habit(&["--run-name", "--run_name", "--experiment-name"], "the name of a run", "name"),
    habit(&["--config-file", "--config_file", "--yaml"], "a file with settings", "config"),
    habit(&["--trace", "--profiler", "--torch-profiler"], "writing traces of steps", "profile"),
    habit(&["--tb"], "writing scalars for TensorBoard", "tensorboard"),
    habit(
        &["--dtype", "--torch-dtype", "--torch_dtype"],
        "the element type of products",
        "precision",
    ),
    Habit {
        theirs: &["--bf16", "--mixed-precision", "--mixed_precision"],
        what: "mixed precision",
        flag: "precision",
        value: Some("bf16"),
    },
    Habit {
        theirs: &["--fp16", "--half"],
        what: "mixed precision with fp16",
        flag: "precision",
        value: Some("fp16"),
    },
    Habit {
        theirs: &["--gpu", "--cuda", "--use-cuda", "--use_cuda"],
        what: "the device to compute on",
        flag: "device",
        value: Some("cuda"),
    },
];

/// Words of others that no single flag answers: the words, the flag that a command must have, and the answer.
pub(super) const EXPLAINED: &[(&[&str], &str, &str)] = &[
    (
        &["--checkpoint", "--ckpt", "--checkpoints"],
        "save",
        "--save DIR writes checkpoints into a folder, and --resume DIR goes on from the last one there; pass one or both",
    ),
    (
        &["--fsdp", "--deepspeed", "--zero", "--zero-stage", "--zero_stage"],
        "strategy",
        "the model is divided among the ranks by a strategy; pass --strategy sharded3, as FSDP and stage 3 of ZeRO do, or \
         sharded2 or sharded1 for the stages 2 and 1",
    ),
    (
        &["--ddp", "--distributed", "--data-parallel"],
        "strategy",
        "ranks train together whenever there are several, by default with --strategy ddp; leave it out, or pass \
         --strategy ddp",
    ),
    (
        &["--nccl"],
        "transport",
        "NCCL connects cards, and is used by itself where each rank has one; pass --device cuda",
    ),
    (
        &["--gloo"],
        "transport",
        "this is a backend of PyTorch; pass --transport shm for ranks of one host, or tcp for ranks of several",
    ),
    (
        &["--pp", "--pipeline-parallel-size", "--pipeline_parallel_size", "--num-stages"],
        "mesh",
        "the stages of a pipeline are an axis of the grid of ranks; pass --mesh pp=N for N stages",
    ),
    (
        &["--tp", "--tensor-parallel-size", "--tensor_parallel_size"],
        "mesh",
        "no strategy divides layers among ranks yet; --strategy sharded3 divides their parameters, and --mesh pp=N the \
         list of layers",
    ),
    (
        &["--wandb", "--report-to", "--report_to", "--mlflow", "--logger"],
        "tensorboard",
        "runs are reported to no service; pass --tensorboard for its event files, or read metrics.jsonl in the run folder",
    ),
];
