// Vercel's AI SDK. `npm install ai @ai-sdk/openai-compatible`
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const server = createOpenAICompatible({ name: "cacheclip", baseURL: process.env.BASE_URL, apiKey: "unused" });
const [question, ...files] = process.argv.slice(2);
const documents = files.map((name) => readFileSync(name, "utf-8")).join("\n\n");
const { text } = await generateText({
  model: server(process.env.MODEL),
  prompt: `${documents}\n\nAnswer in one sentence. ${question}`,
});
console.log(text);
