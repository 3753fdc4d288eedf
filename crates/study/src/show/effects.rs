//! The effect of each value of a varied setting, compared with the first value of the setting.
//!
//! The cases of a sweep and the spread of the figure that ranks them go in. Two cases are a pair if they differ in one
//! setting only. This file knows neither tables nor pages.

use std::collections::HashMap;

use serde::Serialize;

use crate::plan::{Case, Vary};
use crate::rank::Spread;

/// The effect of a value of a setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Effect {
    /// The setting.
    pub key: String,
    /// Its value.
    pub value: String,
    /// The value with which it is compared: the first one that was given.
    pub beside: String,
    /// Pairs of cases with both values that differ in nothing else, and that both have a result.
    pub pairs: usize,
    /// In how many of these pairs the difference is more than noise.
    pub pairs_that_differ: usize,
    /// How much larger the figure is with this value, in percent: the geometric mean over the pairs. `None` without pairs.
    pub change_pct: Option<f64>,
}

/// The effects of all values but the first ones. `spreads` has the result of each case.
pub fn effects(vary: &[Vary], cases: &[Case], spreads: &[Option<Spread>]) -> Vec<Effect> {
    let places = cases.iter().zip(0..).map(|(case, at)| (case.values.as_slice(), at));
    let places: HashMap<&[String], usize> = places.collect();
    let mut found = Vec::new();
    for (at, of) in vary.iter().enumerate() {
        let [beside, others @ ..] = of.alternatives.as_slice() else { continue };
        for value in others {
            let pair = |(case, spread): (&Case, &Option<Spread>)| {
                let mut values = case.values.clone();
                (values.get(at)? == value).then(|| values[at].clone_from(beside))?;
                let base = spreads[*places.get(values.as_slice())?]?;
                Some((base, (*spread)?))
            };
            let pairs: Vec<_> = cases.iter().zip(spreads).filter_map(pair).collect();
            let ratios = pairs.iter().map(|(base, spread)| spread.median / base.median);
            let logs: Vec<f64> = ratios.map(f64::ln).collect();
            let mean = logs.iter().sum::<f64>() / logs.len() as f64;
            found.push(Effect {
                key: of.key.clone(),
                value: value.clone(),
                beside: beside.clone(),
                pairs: pairs.len(),
                pairs_that_differ: pairs.iter().filter(|(a, b)| a.differs_from(b)).count(),
                // A figure that is 0 has no ratio to another one.
                change_pct: mean.is_finite().then(|| 100.0 * (mean.exp() - 1.0)),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Spec;

    #[test]
    fn a_value_is_compared_where_all_else_is_the_same() {
        let vary = ["nproc=1,2", "model=mlp,cnn"].map(|text| Vary::parse("--vary", text).unwrap());
        let case = |values: [&str; 2]| Case {
            name: values.join(" "),
            values: values.map(str::to_owned).into(),
            spec: Spec::default(),
        };
        let cases = [["1", "mlp"], ["1", "cnn"], ["2", "mlp"], ["2", "cnn"]].map(case);
        let spread =
            |median: f64| Some(Spread { median, min: 0.9 * median, max: 1.1 * median, rounds: 3 });
        let all =
            effects(&vary, &cases, &[spread(10.0), spread(20.0), spread(20.0), spread(160.0)]);
        let told: Vec<_> = all
            .iter()
            .map(|of| (of.value.as_str(), of.beside.as_str(), of.pairs, of.pairs_that_differ))
            .collect();
        assert_eq!(told, [("2", "1", 2, 2), ("cnn", "mlp", 2, 2)]);
        // 2 and 8 times, and 2 and 8 times: 4 times on average.
        assert!(all.iter().all(|of| (of.change_pct.unwrap() - 300.0).abs() < 1e-9), "{all:?}");
        // A case that failed makes no pair, and a difference within noise is counted as none.
        let all = effects(&vary, &cases, &[spread(10.0), None, spread(11.0), spread(160.0)]);
        assert_eq!((all[0].pairs, all[0].pairs_that_differ), (1, 0));
        let all = effects(&vary, &cases, &[None; 4]);
        assert!(all.iter().all(|of| of.pairs == 0 && of.change_pct.is_none()), "{all:?}");
    }
}
