//! What the stages compute, and the client checks: the same on both sides to the last bit.

use tessera_tenant_program::rng::Rng;

/// Bytes of an image.
pub const PIXELS: usize = 1024;
/// What the model distinguishes.
pub const CLASSES: usize = 16;
/// Bytes of the model's weights.
pub const WEIGHTS: usize = PIXELS * CLASSES * size_of::<f32>();

/// Floats as they travel.
pub fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Floats as they travelled.
pub fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The image of a request.
pub fn image(id: u64) -> Vec<u8> {
    let mut pixels = vec![0; PIXELS];
    Rng::new(id ^ 0x5eed).fill(&mut pixels);
    pixels
}

/// The model: small numbers, the same everywhere.
pub fn weights() -> Vec<f32> {
    let mut bytes = vec![0u8; PIXELS * CLASSES];
    Rng::new(0xda7a).fill(&mut bytes);
    bytes.iter().map(|byte| f32::from(*byte) / 128.0 - 1.0).collect()
}

/// Pixels to numbers around 0.
pub fn preprocess(pixels: &[u8]) -> Vec<f32> {
    pixels.iter().map(|pixel| f32::from(*pixel) / 127.5 - 1.0).collect()
}

/// One dense layer.
pub fn model(input: &[f32], weights: &[f32]) -> Vec<f32> {
    weights
        .chunks_exact(input.len().max(1))
        .map(|row| row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>() / 8.0)
        .collect()
}

/// The likeliest class, and how likely (softmax).
pub fn postprocess(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let odds: Vec<f32> = logits.iter().map(|logit| (logit - most).exp()).collect();
    let class = logits.iter().position(|logit| *logit == most).unwrap_or_default();
    let probability = 1.0 / odds.iter().sum::<f32>();
    // A handful of classes.
    vec![f32::from(u16::try_from(class).unwrap_or(u16::MAX)), probability]
}

/// What the whole pipeline has to answer.
pub fn expected(id: u64) -> Vec<u8> {
    to_bytes(&postprocess(&model(&preprocess(&image(id)), &weights())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_probabilities_that_differ_between_images() {
        let answers: Vec<Vec<f32>> = (0..64).map(|id| from_bytes(&expected(id))).collect();
        for answer in &answers {
            assert!(answer[0] < 16.0 && answer[1] > 0.0 && answer[1] <= 1.0, "{answer:?}");
        }
        let classes: std::collections::BTreeSet<_> =
            answers.iter().map(|answer| answer[0].to_bits()).collect();
        assert!(classes.len() > 4, "{classes:?}");
    }

    #[test]
    fn floats_travel_unchanged() {
        let values = [0.0, -1.5, f32::MIN_POSITIVE, 1e30];
        assert_eq!(from_bytes(&to_bytes(&values)), values);
    }
}
