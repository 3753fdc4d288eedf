//! What a link costs: the table of link speeds, and what training a model over a link would spend on
//! communication. In go numbers, out come tables; nothing is measured here.

use crate::bench::result::bus_factor;
use crate::text::{hundredths, plain_table, thousands};

/// A kind of link.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkRow {
    /// Its name.
    pub name: String,
    /// Bandwidth in one direction, in GB/s of 1e9 bytes.
    pub bandwidth_gb_s: f64,
    /// Time of the smallest message, in microseconds; `None` where nobody says.
    pub latency_us: Option<f64>,
    /// Where the numbers come from, or what they hold for.
    pub note: String,
}

/// A model, and how long a rank computes on one step of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelRow {
    /// Its name.
    pub name: String,
    /// Number of parameters, of which each has a gradient of four bytes.
    pub params: u64,
    /// Computing time of a step, in milliseconds.
    pub compute_ms: f64,
}

impl ModelRow {
    /// Bytes of the gradients, which are `f32`.
    pub fn gradient_bytes(&self) -> u64 {
        4 * self.params
    }

    /// Milliseconds that `world_size` ranks need to add up their gradients over a link:
    /// `bytes x 2(N-1)/N / bandwidth`. The latency of the link is left out; it is small beside
    /// gradients of megabytes.
    pub fn comm_ms(&self, world_size: usize, link_gb_s: f64) -> f64 {
        let factor = bus_factor("all_reduce", world_size).unwrap_or(0.0);
        self.gradient_bytes() as f64 * factor / link_gb_s / 1e6
    }

    /// Communication as a part of the step, in percent, if nothing of it is hidden:
    /// `comm / (comm + compute)`. 0 where both are.
    pub fn overhead_pct(&self, world_size: usize, link_gb_s: f64) -> f64 {
        let comm = self.comm_ms(world_size, link_gb_s);
        let step = comm + self.compute_ms;
        if step > 0.0 { 100.0 * comm / step } else { 0.0 }
    }
}

/// The table of link speeds.
pub fn speeds(links: &[LinkRow]) -> String {
    let line = |link: &LinkRow| {
        [
            link.name.clone(),
            link.note.clone(),
            short(link.bandwidth_gb_s),
            short(8.0 * link.bandwidth_gb_s),
            link.latency_us.map_or("-".to_owned(), short),
        ]
    };
    let lines: Vec<[String; 5]> = links.iter().map(line).collect();
    plain_table(["Link", "Note", "GB/s", "Gbit/s", "Latency (us)"], 2, &lines)
}

/// The table of what models would spend on communication between `world_size` ranks over `link`.
pub fn overheads(models: &[ModelRow], world_size: usize, link: &LinkRow) -> String {
    let bandwidth = link.bandwidth_gb_s;
    let line = |model: &ModelRow| {
        [
            model.name.clone(),
            thousands(model.params),
            format!("{:.2}", model.gradient_bytes() as f64 / 1e6),
            format!("{:.3}", model.compute_ms),
            format!("{:.3}", model.comm_ms(world_size, bandwidth)),
            format!("{:.1}", model.overhead_pct(world_size, bandwidth)),
        ]
    };
    let lines: Vec<[String; 6]> = models.iter().map(line).collect();
    let names =
        ["Model", "Parameters", "Gradients (MB)", "Compute (ms)", "Comm. (ms)", "Overhead (%)"];
    format!(
        "{} at {} GB/s, {world_size} ranks\ncommunication = bytes x 2(N-1)/N / bandwidth, \
         overhead = communication / (communication + compute)\n{}",
        link.name,
        short(bandwidth),
        plain_table(names, 1, &lines)
    )
}

/// The number with at most two decimals and without needless zeros.
fn short(value: f64) -> String {
    hundredths(value).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, bandwidth_gb_s: f64, latency_us: Option<f64>, note: &str) -> LinkRow {
        LinkRow { name: name.to_owned(), bandwidth_gb_s, latency_us, note: note.to_owned() }
    }

    fn model(name: &str, params: u64, compute_ms: f64) -> ModelRow {
        ModelRow { name: name.to_owned(), params, compute_ms }
    }

    #[test]
    fn links_stand_in_a_table() {
        let links = [
            link("10 GbE", 1.25, Some(50.0), "line rate"),
            link("PCIe 4 x16", 31.507, Some(0.7), "per direction"),
            link("shm, 2 ranks", 8.123, None, "measured here"),
        ];
        insta::assert_snapshot!(speeds(&links), @r"
        Link          Note            GB/s  Gbit/s  Latency (us)
        ------------  -------------  -----  ------  ------------
        10 GbE        line rate       1.25      10            50
        PCIe 4 x16    per direction  31.51  252.06           0.7
        shm, 2 ranks  measured here   8.12   64.98             -
        ");
    }

    #[test]
    fn models_pay_for_their_gradients() {
        let models = [model("small", 109_386, 2.0), model("large", 25_557_032, 180.0)];
        insta::assert_snapshot!(overheads(&models, 4, &link("10 GbE", 1.25, None, "")), @r"
        10 GbE at 1.25 GB/s, 4 ranks
        communication = bytes x 2(N-1)/N / bandwidth, overhead = communication / (communication + compute)
        Model  Parameters  Gradients (MB)  Compute (ms)  Comm. (ms)  Overhead (%)
        -----  ----------  --------------  ------------  ----------  ------------
        small     109,386            0.44         2.000       0.525          20.8
        large  25,557,032          102.23       180.000     122.674          40.5
        ");
    }

    #[test]
    fn overhead_follows_its_formula() {
        // 100 MB at 1.25 GB/s between 2 ranks: 80 ms.
        let model = model("m", 25_000_000, 20.0);
        assert!((model.comm_ms(2, 1.25) - 80.0).abs() < 1e-9);
        assert!((model.overhead_pct(2, 1.25) - 80.0).abs() < 1e-9);
        assert_eq!(model.overhead_pct(1, 1.25), 0.0);
        assert_eq!(ModelRow { compute_ms: 0.0, ..model }.overhead_pct(1, 1.25), 0.0);
    }
}
