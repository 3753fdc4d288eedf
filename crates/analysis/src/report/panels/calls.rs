//! Operators and modules, by their time on host and device.

use super::shared::COUNT;
use crate::calls::{CallSum, Calls};
use crate::report::Panel;
use crate::table::Columns;

/// The most rows of a table.
const ROWS: usize = 500;
const MS: (&str, usize) = ("ms", 3);

const DEFINITION: &str = "Means over steps and ranks, or sums where no steps are known, of the whole trace, as TensorBoard's plugin for PyTorch has them. \
                          Total: from begin to end, with the work of the device that was launched meanwhile. Self: without the operators, modules and spans \
                          within, and without calls of the runtime library.";

/// Operators by name.
pub(super) fn operators(calls: &Calls) -> Panel {
    panel("operators", "Operators", "operator", "The operator.", calls.steps, &calls.operators)
}

/// Modules by name: the forward passes, because those of autograd call no module.
pub(super) fn modules(calls: &Calls) -> Panel {
    let definition = "The module, with its number in the trace: those of the forward pass.";
    panel("modules", "Modules", "module", definition, calls.steps, &calls.modules)
}

#[rustfmt::skip]
fn panel(id: &str, title: &str, label: &'static str, name: &'static str, steps: u64, all: &[CallSum]) -> Panel {
    let per = steps.max(1) as f64;
    let ms = move |of: &CallSum, at: usize| of.times[at] as f64 / 1e6 / per;
    let mut columns = Columns::<&CallSum>::new()
        .add("name", label, COUNT, name, |of| of.name.clone())
        .add("calls", "calls", ("", 1), "How often it was called.", move |of| of.calls as f64 / per);
    if all.iter().any(|of| of.times[1] > 0) {
        columns = columns
            .add("self_device_ms", "device, self", MS, "Kernels and copies that it launched itself.", move |of| ms(of, 0))
            .add("device_ms", "device, total", MS, "The same, with those of all that it called.", move |of| ms(of, 1));
    }
    let columns = columns
        .add("self_host_ms", "host, self", MS, "Time on the host, without what it called.", move |of| ms(of, 2))
        .add("host_ms", "host, total", MS, "Time on the host from begin to end.", move |of| ms(of, 3));
    let shown = all.iter().take(ROWS);
    Panel::table(id, title, DEFINITION, columns.table(shown), "The traces have none.")
}
