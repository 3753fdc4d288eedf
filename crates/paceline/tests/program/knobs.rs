//! Learning rate schedules, clipping, evaluation during training, and ranks with different numbers of samples.

use crate::common::{Sandbox, TINY, TINY_MLP, column, metrics, weights_of};
use serde_json::Value;

#[test]
fn the_learning_rate_follows_its_schedule() {
    // 4 steps of 50 samples make an epoch.
    let flags = format!(
        "{TINY} --global-batch-size 50 --nproc 2 --optimizer adamw --lr 0.1 --lr-schedule cosine \
         --lr-warmup-steps 3 --min-lr 0.01 --epochs 3"
    );
    let sandbox = Sandbox::new();
    let run = sandbox.train(&flags).ok();
    let rates = column(&sandbox.run_folder(), "lr");
    assert_eq!(rates.len(), 12);
    assert_eq!(rates[..4], [0.025, 0.05, 0.075, 0.1]);
    // A third of the nine steps after the warm-up: the cosine of 60 degrees is one half.
    assert!((rates[6] - (0.01 + 0.09 * 0.75)).abs() < 1e-15, "{rates:?}");
    assert!(rates[3..].is_sorted_by(|a, b| a > b) && rates[11] > 0.01, "{rates:?}");
    let constant = flags.replace("--lr-schedule cosine --lr-warmup-steps 3 --min-lr 0.01", "");
    assert_ne!(run.weights(), weights_of(&constant));

    // A run of two epochs ends at another rate than a run of three epochs has after two.
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{} --save saved", flags.replace("epochs 3", "epochs 2"))).ok();
    let words =
        ["--lr-steps 8", "this run has 12", "another course", "pass fewer --epochs, or its"];
    sandbox.train(&format!("{flags} --resume saved")).refused(&words);
}

#[test]
fn gradients_are_clipped_by_their_norm() {
    let flags = "--channels 4 --hidden 8 --samples 200 --global-batch-size 50 --lr 0.1 --epochs 2";
    let norms_of = |flags: &str| {
        let sandbox = Sandbox::new();
        let run = sandbox.train(flags).ok();
        (column(&sandbox.run_folder(), "grad_norm"), run.weights().to_owned())
    };
    // With a limit that no norm reaches, norms are only written down.
    let (norms, weights) = norms_of(&format!("{flags} --nproc 2 --clip-grad-norm 1e6"));
    assert!(norms.iter().all(|norm| *norm > 0.01 && *norm < 100.0), "{norms:?}");
    assert_eq!(weights, weights_of(&format!("{flags} --nproc 2")));
    // With plain gradient descent, halving the first gradient is like halving the learning rate.
    let first = |flags: &str| {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{flags} --nproc 2 --epochs 1 --steps-per-epoch 2")).ok();
        column(&sandbox.run_folder(), "loss")[1]
    };
    let flags = flags.replace(" --epochs 2", "");
    let clipped = first(&format!("{flags} --clip-grad-norm {}", norms[0] / 2.0));
    let halved = first(&flags.replace("--lr 0.1", "--lr 0.05"));
    assert!((clipped - halved).abs() < 1e-6, "{clipped}, {halved}");
    assert!((clipped - first(&flags)).abs() > 1e-4);
    // Every strategy, transport and number of threads has the same norm, to the bit.
    let limit = norms[0] / 4.0;
    let flags = format!("{flags} --epochs 2 --clip-grad-norm {limit}");
    let expected = norms_of(&format!("{flags} --nproc 2"));
    for other in ["--strategy simple_ddp", "--transport thread"] {
        assert_eq!(norms_of(&format!("{flags} --nproc 2 {other}")), expected, "{other}");
    }
    for (got, expected) in norms_of(&format!("{flags} --nproc 1")).0.iter().zip(&expected.0) {
        // Sums over the batch in another order, in f32.
        assert!((got - expected).abs() < 1e-4 * expected, "{got}, {expected}");
    }
}

#[test]
fn a_norm_that_is_not_finite_stops_all_ranks() {
    for transport in ["thread", "shm"] {
        // The first step moves the weights so far out that the next gradient overflows, but not the loss, summed in
        // f64.
        let flags = format!("{TINY_MLP} --nproc 2 --transport {transport} --lr 1e18");
        let run = Sandbox::new().train(&format!("{flags} --clip-grad-norm 1e30"));
        assert_eq!(run.code, Some(1), "{run:#?}");
        // The order of the sums, and so the processor, decides whether it is NaN or infinite.
        let norm = "the gradient norm of step 2 is not finite (";
        run.says(&[norm, "), with a learning rate of 1e18", "before the optimizer step"]);
        assert!(!run.stdout.contains("Total time"), "{}", run.stdout);
    }
}

#[test]
fn all_ranks_evaluate_together_every_few_steps() {
    // Four steps of 50 make an epoch, so evaluations fall within epochs and on their ends.
    let flags = "--channels 4 --hidden 8 --samples 200 --global-batch-size 50 --epochs 3";
    let mut seen = Vec::new();
    for nproc in [1, 3] {
        let sandbox = Sandbox::new();
        let flags = format!("{flags} --nproc {nproc} --lr 0");
        let run = sandbox.train(&format!("{flags} --eval-every 2 --evaluate")).ok();
        let lines = metrics(&sandbox.run_folder());
        let (evaluations, steps): (Vec<&Value>, Vec<&Value>) =
            lines.iter().partition(|line| line["eval_loss"].is_number());
        assert_eq!((evaluations.len(), steps.len()), (6, 12));
        for (at, line) in evaluations.iter().enumerate() {
            assert_eq!(line["step"], 2 * at as u64 + 2);
            assert_eq!(line["eval_samples"], 50.0);
            let said = run.line(&format!("Step {}: evaluation loss ", 2 * at + 2));
            let (loss, accuracy) = (line["eval_loss"].as_f64(), line["eval_accuracy"].as_f64());
            let (loss, accuracy) = (loss.unwrap(), 100.0 * accuracy.unwrap());
            assert_eq!(said, format!("{loss:.4}, accuracy {accuracy:.2} %, over 50 samples"));
            // Nothing is learned, so every evaluation gives the result of the final one.
            let last = run.line("Evaluation loss: ");
            assert!(last.starts_with(&format!("{loss:.4}, ")), "{last}");
            seen.push(format!("{loss:.4} {accuracy}"));
        }
        assert!(steps.iter().all(|step| step["step_ms"].is_number()));
    }
    assert!(seen.iter().all(|line| *line == seen[0]), "{seen:?}");
    // Evaluation does not change what is learned.
    let flags = format!("{flags} --nproc 2 --momentum 0.9");
    assert_eq!(weights_of(&format!("{flags} --eval-every 1")), weights_of(&flags));
}

#[test]
fn the_metrics_end_with_the_evaluation_of_the_trained_model() {
    // Four steps of 50 make an epoch: the last evaluation during training is that of step 6.
    let flags = "--channels 4 --hidden 8 --samples 200 --global-batch-size 50 --epochs 2 --nproc 2";
    for more in ["--evaluate", "--evaluate --eval-every 3", "--evaluate --eval-every 4"] {
        let sandbox = Sandbox::new();
        let run = sandbox.train(&format!("{flags} {more}")).ok();
        let lines = metrics(&sandbox.run_folder());
        let steps: Vec<&Value> = lines
            .iter()
            .filter(|line| line["eval_loss"].is_number())
            .map(|line| &line["step"])
            .collect();
        let expected: &[u64] = match more {
            "--evaluate" => &[8],
            "--evaluate --eval-every 3" => &[3, 6, 8],
            _ => &[4, 8],
        };
        assert_eq!(steps, expected.to_vec(), "{more}");
        let last = lines.last().unwrap();
        assert_eq!((&last["epoch"], &last["eval_samples"]), (&2.into(), &50.0.into()), "{more}");
        let said = run.line("Evaluation loss: ");
        assert!(
            said.starts_with(&format!("{:.4},", last["eval_loss"].as_f64().unwrap())),
            "{said}"
        );
    }
}

#[test]
fn ranks_with_different_numbers_of_samples_train_together() {
    // In batches of 20: ranks of 5, 2, no and 1 steps, the last two with short batches.
    let flags = "--channels 4 --hidden 8 --samples 200 --nproc 4 --rank-samples 95 40 0 7 \
                 --batch-size 20 --epochs 3 --momentum 0.9 --eval-every 5";
    let mut digests = Vec::new();
    for other in ["", "--strategy simple_ddp", "--transport thread", "--transport tcp"] {
        let sandbox = Sandbox::new();
        let run = sandbox.train(&format!("{flags} {other}")).ok();
        let lines = metrics(&sandbox.run_folder());
        let samples: Vec<u64> = lines.iter().filter_map(|line| line["samples"].as_u64()).collect();
        let epoch = [47, 40, 20, 20, 15];
        assert_eq!(samples, [epoch, epoch, epoch].concat(), "{other}");
        let summary = sandbox.summary();
        let number = |key: &str| summary[key].as_f64().unwrap();
        // 142 samples in five steps.
        let speed = 142.0 / 5.0 / number("step_ms_median") * 1e3;
        assert!((number("samples_per_s_without_data") / speed - 1.0).abs() < 1e-9);
        digests.push(run.weights().to_owned());
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");

    // A step with all samples is the same step, whichever rank has them, except for the order of sums.
    let flags = format!("{TINY} --epochs 2");
    let losses = |more: &str| {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{flags} {more}")).ok();
        column(&sandbox.run_folder(), "loss")
    };
    let whole = losses("--nproc 1 --batch-size 200");
    for more in ["--nproc 3 --rank-samples 150 0 50", "--nproc 2 --rank-samples 1 199"] {
        let shared = losses(&format!("{more} --batch-size 199"));
        assert_eq!(shared.len(), whole.len());
        for (got, expected) in shared.iter().zip(&whole) {
            assert!((got - expected).abs() < 1e-5, "{more}: {shared:?}, {whole:?}");
        }
    }
    // The same holds for vectors, which are generated each time.
    let flags = format!("{TINY_MLP} --nproc 2 --batch-size 16 --rank-samples 40 8 --epochs 2");
    Sandbox::new().train(&flags).ok();
}
